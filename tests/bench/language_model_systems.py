"""Systems that generate text, each in a process that bench_language_models.py drives by a pipe.

    python tests/bench/language_model_systems.py SYSTEM OPTIONS

OPTIONS are those of the system's class, as JSON. Each line of standard input is a call: the name of
a method and its arguments, as JSON; so is each line of the answer.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Tokens = list[int]
Request = tuple[Tokens, int]
"""A prompt, and how many tokens are asked for."""
now = time.perf_counter


class System:
    """What all systems answer. The times of a text are those at which its tokens came."""

    def follow(self, prompts: Sequence[Tokens], new: int) -> tuple[list[list[float]], list[Tokens]]:
        """Generates at least `new` tokens of each text in one batch; returns times and tokens."""
        raise NotImplementedError

    def serve(self, clients: Sequence[Sequence[Request]]) -> list[list[float]]:
        """Answers requests, of which each client sends one after the other; returns for each when
        it was sent and when its tokens came."""
        raise NotImplementedError

    def generate(self, prompts: Sequence[Tokens], new: int) -> dict[str, Any]:
        """Seconds to the first token: `first` until all texts have it, `mean_first` of a text; and
        seconds of each further one, while all texts run."""
        start = now()
        times, tokens = self.follow(prompts, new)
        last = max(times, key=lambda each: each[0])
        return {
            "first": last[0] - start,
            "mean_first": sum(each[0] - start for each in times) / len(times),
            "each": (last[new - 1] - last[0]) / (new - 1),
            "tokens": [each[:new] for each in tokens],
        }

    def requests(self, clients: Sequence[Sequence[Request]]) -> dict[str, Any]:
        """Seconds of all requests, of each to its first token and to its end, and all tokens."""
        start = now()
        served = self.serve(clients)
        return {
            "seconds": now() - start,
            "first": [times[1] - times[0] for times in served],
            "whole": [times[-1] - times[0] for times in served],
            "tokens": sum(len(times) - 1 for times in served),
        }

    def memory(self) -> list[int]:
        """Peak bytes of this process, and of those that it has started and that do work."""
        pids = [os.getpid(), *_children()]
        return [_peak(pid) for pid in pids]


class Onnxpar(System):
    """An engine of onnxpar over ranks of one thread."""

    def __init__(self, par: str, kv_memory: int, threads: int) -> None:
        from onnxpar.llm.engine import Engine

        self._engine = Engine(par, kv_memory=kv_memory, threads=threads)

    def follow(self, prompts: Sequence[Tokens], new: int) -> tuple[list[list[float]], list[Tokens]]:
        from onnxpar.llm.requests import Limits, Token

        texts = range(len(prompts))
        times: list[list[float]] = [[] for _ in texts]
        tokens: list[Tokens] = [[] for _ in texts]
        left = set(texts)
        ended = threading.Event()
        made: list[Any] = []

        def listen(text: int, event: Any) -> None:
            if isinstance(event, Token):
                times[text].append(now())
                tokens[text].append(event.id)
                if all(len(each) >= new for each in times):
                    for generation in made:
                        generation.cancel()
            else:
                left.discard(text)
                if not left:
                    ended.set()

        # Texts that begin early go on until the last one is done, so that all run together.
        limits = Limits(max_new_tokens=1024)
        with self._engine._changed:  # no step before all are sent, as in a batch
            made += [
                self._engine.submit(prompt, limits, lambda event, text=text: listen(text, event))
                for text, prompt in enumerate(prompts)
            ]
        ended.wait()
        return times, tokens

    def serve(self, clients: Sequence[Sequence[Request]]) -> list[list[float]]:
        served: list[list[float]] = []
        threads = [
            threading.Thread(target=self._send, args=(requests, served)) for requests in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return served

    def _send(self, requests: Sequence[Request], served: list[list[float]]) -> None:
        """Is a client."""
        from onnxpar.llm.requests import Limits, Token

        for prompt, new in requests:
            times, ended = [now()], threading.Event()

            def listen(event: Any, times: list[float] = times, ended: Any = ended) -> None:
                if isinstance(event, Token):
                    times.append(now())
                else:
                    ended.set()

            self._engine.submit(prompt, Limits(max_new_tokens=new), listen)
            ended.wait()
            served.append(times)


class Genai(System):
    """onnxruntime-genai's Generator: one batch of texts of the same length."""

    def __init__(self, folder: str, threads: int) -> None:
        self._model = _genai_model(folder, threads)

    def follow(self, prompts: Sequence[Tokens], new: int) -> tuple[list[list[float]], list[Tokens]]:
        import onnxruntime_genai as genai

        params = genai.GeneratorParams(self._model)
        most = len(prompts[0]) + new
        params.set_search_options(max_length=most, batch_size=len(prompts), do_sample=False)
        generator = genai.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        steps, times = [], []
        for _ in range(new):
            generator.generate_next_token()
            steps.append(generator.get_next_tokens().tolist())
            times.append(now())
        return [times] * len(prompts), [list(text) for text in zip(*steps, strict=True)]

    def serve(self, clients: Sequence[Sequence[Request]]) -> list[list[float]]:
        served, sent = [], [now()] * len(clients)
        for turn in range(len(clients[0])):  # the client that has waited longest comes next
            for client, requests in enumerate(clients):
                prompt, new = requests[turn]
                (times,), _ = self.follow([prompt], new)
                served.append([sent[client], *times])
                sent[client] = times[-1]
        return served


class GenaiEngine(System):
    """onnxruntime-genai's Engine, which on a CPU has static batches: texts wait until all of a
    batch have ended."""

    def __init__(self, folder: str, threads: int, batch: int) -> None:
        import onnxruntime_genai as genai

        static = {"engine": {"static_batching": {"max_batch_size": batch}}}
        self._model = _genai_model(folder, threads, static)
        self._engine = genai.Engine(self._model)
        self._buffer = self._engine.create_event_buffer(8 * batch)

    def follow(self, prompts: Sequence[Tokens], new: int) -> tuple[list[list[float]], list[Tokens]]:
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[Tokens] = [[] for _ in prompts]

        def hear(text: int, token: int, is_last: bool) -> None:
            times[text].append(now())
            tokens[text].append(token)

        self._run([(prompt, new) for prompt in prompts], hear)
        return times, tokens

    def serve(self, clients: Sequence[Sequence[Request]]) -> list[list[float]]:
        left = [deque(requests) for requests in clients]
        times = [[now()] for _ in clients]
        served: list[list[float]] = []

        def hear(client: int, token: int, is_last: bool) -> Request | None:
            times[client].append(now())
            if not is_last:
                return None
            served.append(times[client])
            times[client] = [now()]
            return left[client].popleft() if left[client] else None

        self._run([each.popleft() for each in left], hear)
        return served

    def _run(self, given: Sequence[Request], hear: Callable[[int, int, bool], Any]) -> None:
        """Runs until all requests have ended. `hear` gets each token of a client, and may return
        its next request with the last one."""
        import onnxruntime_genai as genai

        running: dict[int, Any] = {}

        def send(client: int, request: Request) -> None:
            made = self._engine.create_request()
            options = genai.TurnOptions(made)
            options.set_max_generated_tokens(request[1])
            made.begin_turn(np.array(request[0], np.int32), options)
            running[client] = made

        for client, request in enumerate(given):
            send(client, request)
        while self._engine.has_pending_requests():
            for event in self._engine.run(self._buffer):
                client = next(c for c, made in running.items() if made is event.request)
                is_last = bool(int(event.flags) & int(genai.EngineEventFlags.TURN_FINISHED))
                following = hear(client, int(event.token), is_last)
                if is_last:
                    running.pop(client).close()
                if following:
                    send(client, following)


class Onnxruntime(System):
    """A loop over onnxruntime whose caches stay in their buffers, by IO binding."""

    def __init__(self, folder: str, threads: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = ort.InferenceSession(Path(folder) / "model.onnx", options)
        decoder = json.loads((Path(folder) / "genai_config.json").read_text())["model"]["decoder"]
        self._heads, self._size = decoder["num_key_value_heads"], decoder["head_size"]
        names = [port.name for port in self._session.get_inputs()]
        self._caches = [name for name in names if name.startswith("past_key_values.")]

    def follow(self, prompts: Sequence[Tokens], new: int) -> tuple[list[list[float]], list[Tokens]]:
        import onnxruntime as ort

        texts, length = len(prompts), len(prompts[0])
        binding = self._session.io_binding()
        for name in self._caches:
            cache = np.zeros((texts, self._heads, length + new, self._size), np.float32)
            value = ort.OrtValue.ortvalue_from_numpy(cache)
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        vocabulary = self._session.get_outputs()[0].shape[-1]
        logits = np.empty((texts, 1, vocabulary), np.float32)
        scores = ort.OrtValue.ortvalue_from_numpy(logits)
        binding.bind_ortvalue_output("logits", scores)
        mask = np.ones((texts, length + new), np.int64)
        tokens, times, steps = np.array(prompts, np.int64), [], []
        for step in range(new):
            binding.bind_cpu_input("input_ids", tokens)
            binding.bind_cpu_input("attention_mask", mask[:, : length + step].copy())
            self._session.run_with_iobinding(binding)
            tokens = scores.numpy()[:, -1].argmax(-1)[:, None]
            steps.append(tokens[:, 0].tolist())
            times.append(now())
        return [times] * texts, [list(text) for text in zip(*steps, strict=True)]


SYSTEMS = {each.__name__: each for each in (Onnxpar, Genai, GenaiEngine, Onnxruntime)}


def _genai_model(folder: str, threads: int, more: dict[str, Any] | None = None) -> Any:
    import onnxruntime_genai as genai

    config = genai.Config(folder)
    options = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    if more:
        config.overlay(json.dumps(more))
    return genai.Model(config)


def _children() -> list[int]:
    """The processes that this one has started."""
    listed = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in listed for pid in file.read_text().split()]


def _peak(pid: int) -> int:
    """The most bytes that a process had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Answers calls until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print, too
    system = SYSTEMS[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(system, name)(*arguments)), file=answers)
    os._exit(0)


if __name__ == "__main__":
    main()
