"""What bench_peers.py prints and draws."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.peers import Figure

PACKAGES = ("onnxpar", "onnxruntime", "torch", "jax", "mpi4py", "numpy")
COLOURS = {"onnxpar": "#3949ab", "JAX": "#8e7cc3", "torch": "#ee8a5f", "OpenMPI": "#7cb07c"}
OTHER = "#b0bec5"
BEGIN, END = "<!-- figures of bench_peers.py -->", "<!-- end of the figures -->"
Tables = Mapping[str, Mapping[str, Figure]]


def machine() -> dict[str, str]:
    """The day, the processor and the versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "CPU")
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores of {model}, {platform.system()}",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            about[package] = "not installed"
    return about


def show(about: Mapping[str, str], tables: Tables) -> str:
    """Tables in Markdown: times with quartiles, and the speed-up over the first row."""
    lines = [f"{key}: {value}" for key, value in about.items()]
    for name, table in tables.items():
        base = next(iter(table.values()))
        lines += ["", f"| {name} | ms | quartiles | speed-up | quiet turns | error |"]
        lines.append("|---|---|---|---|---|---|")
        for peer, figure in table.items():
            low, middle, high = (text(x) for x in (figure.low, figure.median, figure.high))
            error = f"{figure.error:.0e}" if figure.error else "-"
            lines.append(
                f"| {peer} | {middle} | {low} to {high} | {base.median / figure.median:.2f} "
                f"| {figure.quiet} of {figure.turns} | {error} |"
            )
    return "\n".join(lines)


def text(seconds: float) -> str:
    """Milliseconds in three digits."""
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def write_page(path: Path, about: Mapping[str, str], tables: Tables) -> None:
    """Puts the tables between the marks of a page. Errors: ValueError if it has no marks."""
    before, rest = path.read_text().split(BEGIN)
    _, behind = rest.split(END)
    versions = ", ".join(f"{name} {version}" for name, version in about.items() if name in PACKAGES)
    head = (
        f"Measured on {about['date']}, on {about['machine']}: Python {about['python']}, {versions}."
    )
    path.write_text(f"{before}{BEGIN}\n\n{head}\n{show({}, tables)}\n\n{END}{behind}")


def write_plot(path: Path, about: Mapping[str, str], tables: Tables) -> None:
    """Draws the speed-up of each system over the first of its table, with quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "onnxpar"
    from matplotlib import pyplot

    drawn = {name: table for name, table in tables.items() if "memcpy" not in table}
    heights = [len(table) for table in drawn.values()]
    size = (7, 0.28 * sum(heights) + 0.75 * len(heights) + 0.3)
    figure, axes = pyplot.subplots(
        len(drawn), figsize=size, squeeze=False, height_ratios=heights, layout="constrained"
    )
    for ax, (name, table) in zip(axes[:, 0], drawn.items(), strict=True):
        base = next(iter(table.values())).median
        ratios = [base / figure.median for figure in table.values()]
        colours = [
            next((c for word, c in COLOURS.items() if peer.startswith(word)), OTHER)
            for peer in table
        ]
        away = [
            [ratio - base / f.high for ratio, f in zip(ratios, table.values(), strict=True)],
            [base / f.low - ratio for ratio, f in zip(ratios, table.values(), strict=True)],
        ]
        bars = ax.barh(list(table), ratios, color=colours, xerr=away, ecolor="#455a64")
        ax.bar_label(bars, [f" {ratio:.2f}" for ratio in ratios], padding=3, fontsize=8)
        ax.invert_yaxis()
        ax.set_title(f"{name}: speed-up over {next(iter(table))}", fontsize=9, loc="left")
        ax.tick_params(labelsize=8)
        ax.set_xlim(0, max(2.1, max(ratios) * 1.1))
        ax.spines[["top", "right"]].set_visible(False)
    figure.text(0.99, 0.002, f"{about['date']}, {about['machine']}", ha="right", fontsize=6)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
