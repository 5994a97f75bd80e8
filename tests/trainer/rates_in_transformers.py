"""Prints the table of test_rates.py (run by hand, with transformers 5 and PyTorch 2.13)."""

import torch
from torch.optim.lr_scheduler import LRScheduler, StepLR
from transformers import optimization as schedules

WARMUP, STEPS, PEAK = 2, 8, 2.0


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], PEAK)


def rates(schedule: LRScheduler, skipped: int = WARMUP) -> list[float]:
    found = []
    for _ in range(STEPS - WARMUP + skipped):
        found.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return [float(f"{rate:.8g}") for rate in found[skipped:]]


def main() -> None:
    o, both = optimizer, (WARMUP, STEPS)
    cases = {
        "linear": ({}, schedules.get_linear_schedule_with_warmup(o(), *both)),
        "cosine": ({}, schedules.get_cosine_schedule_with_warmup(o(), *both)),
        "cosine to a rate": (
            {"min_lr": 0.5},
            schedules.get_cosine_with_min_lr_schedule_with_warmup(o(), *both, min_lr=0.5),
        ),
        "polynomial": (
            {"power": 2.0, "min_lr": 0.5},
            schedules.get_polynomial_decay_schedule_with_warmup(o(), *both, lr_end=0.5, power=2.0),
        ),
        "inverse-sqrt": ({}, schedules.get_inverse_sqrt_schedule(o(), WARMUP)),
        "wsd": (
            {"decay_steps": 3, "min_lr": 0.5},
            schedules.get_wsd_schedule(o(), WARMUP, 3, STEPS, min_lr_ratio=0.25),
        ),
    }
    table = {n: ({"kind": n.split()[0], **how}, rates(s)) for n, (how, s) in cases.items()}
    table["step"] = ({"kind": "step", "step_size": 2, "gamma": 0.5}, rates(StepLR(o(), 2, 0.5), 0))
    print(table)


if __name__ == "__main__":
    main()
