"""The main loop of a rank's process: joins the world, and answers the session's messages."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from onnxpar.base.arrays import Array
from onnxpar.runtime.ranks.arena import NOWHERE, Arena, Slot
from onnxpar.runtime.ranks.doorbell import Line
from onnxpar.runtime.ranks.executor import Executor
from onnxpar.runtime.ranks.groups import World
from onnxpar.runtime.ranks.log import describe, log
from onnxpar.runtime.ranks.planned_run import KeptShapes, Request
from onnxpar.runtime.ranks.timing import serve_timing
from onnxpar.runtime.ranks.watch import Watch
from onnxpar.runtime.ranks.wire import Message
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.options import SessionSpec
from onnxpar.runtime.session.values import BYTES, of_bytes, to_bytes


def serve(line: Line, watch: Watch, files: Sequence[int]) -> None:
    """Answers the session's messages until "close".

    line   the connection to the session
    watch  the thread that listens while the rank computes
    files  the file descriptors of the shared memory, in the order in which `Server` takes it

    The first message describes the rank. If it has no path of a sharded model, the rank serves the
    messages of a calibration instead.
    """
    start = line.receive()
    assert start is not None, "the first call has a message"
    share = start["share"]
    if share["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share["cores"])
    if start["path"] is None:
        return serve_timing(line, watch, start)
    bundle = Bundle.load(start["path"])
    world = World.create(f"rank-{watch.rank}", **start["world"])
    watch.join(world)
    spec = SessionSpec.from_json(start["spec"])
    executor = Executor(bundle, world, spec, share["threads"], share["spin"])
    line.send(dict(executor.facts()))
    server = Server(bundle, world, executor, *map(Arena, files))
    watch.stop = server.stop
    while (message := line.receive()) is None or message["do"] != "close":
        line.send(server.answer(message))
    watch.stop = None
    # Ends profiling. The kernels use the world, so it must outlive the session.
    del server, executor
    world.close()


class Server:
    """Answers the session's messages to one rank. Arrays are not in the messages but in shared
    memory: `inputs` (copied for each run), `lasting` (read in place) and `outputs`."""

    def __init__(
        self,
        bundle: Bundle,
        world: World,
        executor: Executor,
        inputs: Arena,
        lasting: Arena,
        outputs: Arena,
    ) -> None:
        self._ports = bundle.inputs
        self._world = world
        self._rank = world.rank
        self._calls = 1  # the start was one
        self._executor = executor
        self._inputs = inputs
        self._lasting = lasting
        self._outputs = outputs
        self._ran: Message = {}
        self._told: tuple[Mapping[str, Slot], KeptShapes] | None = None
        """The content of the last answer to a run: slots, and shapes of kept states."""
        self._actions: Mapping[str, Callable[[Message], Message]] = {
            "run": self._run,
            "read": self._read,
            "write": self._write,
            "clear": self._clear,
            "reset": self._reset,
            "save": self._save,
            "save later": self._save_later,
            "load": self._load,
            "profile": lambda _: self._executor.end_profile(),
        }

    def answer(self, message: Message | None) -> Message | None:
        """Executes a message (None: the last run again); returns the answer, None if a repeated run
        has the same answer as before. An error ends the call on all ranks; the rank is usable again
        after the message "renew"."""
        self._calls += 1
        if message is not None and message["do"] == "renew":
            self._executor.undo()
            return {"reason": self._world.renew()}
        if message is not None and message["do"] == "undo":
            self._executor.undo()
            return {}
        self._executor.settle()
        try:
            self._outputs.clear()
            if message is None:
                return self._run_again()
            return self._actions[message["do"]](message)
        except Exception as error:  # the outermost boundary of a call: the other ranks wait for it
            log(error)
            text = describe(error)
            if not self._executor.stopped:
                self._world.interrupt(f"rank {self._rank} failed: {text}")
            return {"error": text, "goes_on": True}

    def stop(self, call: int) -> None:
        """Makes the run of call number `call` end, if it still runs; any thread may call this."""
        running = self._executor.running
        if running is not None and self._calls == call:
            self._executor.stop(running)

    def _run(self, message: Message) -> Message:
        sizes = tuple(message["sizes"])
        several = message["times"], message["carried"]
        request = Request(message["fetch"], message["keep"], message["options"], sizes, *several)
        self._tell(self._executor.run(request, self._feeds(message), self._outputs))
        return self._ran

    def _run_again(self) -> Message | None:
        """Runs the last request again; returns the answer, None if it is the same as before."""
        slots = self._executor.run_again(self._outputs)
        told = self._told
        if told is not None and slots is told[0] and self._executor.kept_shapes is told[1]:
            return None
        before = self._ran
        self._tell(slots)
        return None if self._ran == before else self._ran

    def _tell(self, slots: Mapping[str, Slot]) -> None:
        """Sets the answer to a run: the places of these results, and the shapes of kept states."""
        self._told = slots, self._executor.kept_shapes
        self._ran = {**self._sent(slots), "kept": self._executor.kept_shapes}

    def _read(self, message: Message) -> Message:
        sizes = tuple(message["sizes"])
        rows = tuple(message["rows"]) if message["rows"] else None
        return self._sent(self._executor.read_state(message["name"], self._outputs, sizes, rows))

    def _write(self, message: Message) -> Message:
        for name, array in self._feeds(message).items():
            self._executor.write_state(name, array)
        return {}

    def _clear(self, message: Message) -> Message:
        self._executor.clear_state(message["name"], tuple(message["sizes"]))
        return {}

    def _reset(self, message: Message) -> Message:
        self._executor.reset_states()
        return {}

    def _save(self, message: Message) -> Message:
        folder, sizes = Path(message["folder"]), tuple(message["sizes"])
        return {"files": self._executor.save_states(folder, sizes)}

    def _save_later(self, message: Message) -> Message:
        self._executor.save_states_later(Path(message["folder"]), tuple(message["sizes"]))
        return {}

    def _load(self, message: Message) -> Message:
        folder, sizes = Path(message["folder"]), tuple(message["sizes"])
        self._executor.load_states(folder, message["names"], sizes, message["origin"])
        return {}

    def _feeds(self, message: Message) -> dict[str, Array]:
        """Returns this rank's shards of inputs, by name. The message has their places in shared
        memory: one [offset, shape, whether the memory is lasting] for all ranks, or a list with one
        for each rank."""
        self._inputs.map(message["size"])
        self._lasting.map(message["lasting"])
        feeds = {}
        for name, where in message["feeds"].items():
            offset, shape, lasts = where[self._rank] if isinstance(where[0], list) else where
            memory = self._lasting if lasts else self._inputs
            port = self._ports[name]
            if port.is_value:
                feeds[name] = of_bytes(memory.view(offset, BYTES, tuple(shape)))
            else:
                feeds[name] = memory.view(offset, port.dtype, tuple(shape))
        return feeds

    def _sent(self, slots: Mapping[str, Slot]) -> Message:
        """Returns the part of an answer that says where outputs lie in shared memory; a value that
        is no tensor of numbers is copied there as bytes."""
        sent = {}
        for name, slot in slots.items():
            if slot.offset == NOWHERE:
                data = to_bytes(slot.array)
                (slot,) = self._outputs.place([(BYTES, data.shape)])
                slot.array[...] = data
            sent[name] = [slot.offset, list(slot.array.shape)]
        return {"size": self._outputs.size, "slots": sent}
