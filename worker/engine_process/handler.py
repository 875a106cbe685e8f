"""What an engine process does with the messages of its service process, whichever engine it has."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.messages import FromEngine, FromRouter, ToEngine


class Handler:
    """Each engine says what it can do. The rest is refused by its `name`. One thread makes all calls."""

    def __init__(self, attempts: AttemptTable[Any], send: Callable[[FromEngine], None], name: str) -> None:
        """`send` takes messages for the service process."""
        self._attempts = attempts
        self._send = send
        self._name = name
        self._change_weights: Callable[[messages.OfWeights], None] = self._refuse_weights

    def handle(self, message: ToEngine) -> bool:
        """Returns False with Stop, the last message but Exit: all attempts have failed."""
        match message:
            case FromRouter(stream, data):
                said = pb.RouterMessage.FromString(data)
                kind = str(said.WhichOneof("kind"))
                if kind == "cancel":
                    self._attempts.cancel(stream, said.cancel.attempt_id)
                else:
                    self._said(kind, getattr(said, kind), message)
            case messages.Detached(stream):
                self._attempts.cancel(stream, None)
            case messages.AskStatus(question):
                self._send(self.status(question))
            case messages.HandBack(reason, but_decodes):
                self._attempts.end_all(pb.FAILURE_CODE_DRAINING, reason, but_decodes=but_decodes)
            case messages.Pause():
                self._send(self._pause(message))
            case messages.StageWeights() | messages.ReplaceWeights() | messages.DropWeights():
                self._change_weights(message)
            case messages.SetMemory():
                self._send(self._set_memory(message))
            case messages.LoadAdapter() | messages.UnloadAdapter():
                self._change_adapters(message)
            case messages.Stop():
                self._attempts.fail_all(pb.FAILURE_CODE_DRAINING, "the worker shuts down")
                self._attempts.flush()
                self._send(messages.Stopped())
                return False
            case _:
                raise AssertionError(f"not for this engine: {message}")
        return True

    def status(self, question: int) -> messages.EngineStatus:
        raise NotImplementedError

    def _said(self, kind: str, content: Any, message: FromRouter) -> None:
        """A router says this, and it is no cancel. `content`: of the field `kind`."""
        raise NotImplementedError

    def _pause(self, message: messages.Pause) -> messages.Paused:
        raise NotImplementedError

    def _refuse_weights(self, message: messages.OfWeights) -> None:
        if isinstance(message, messages.StageWeights):
            why = f"{self._name}: its weights cannot be replaced; start the workers again"
            self._send(messages.WeightsStaged(message.question, 0, why))

    def _set_memory(self, message: messages.SetMemory) -> messages.MemorySet:
        why = f"{self._name}: its memory cannot be released"
        return messages.MemorySet(message.question, [], lost_weights=False, busy=False, error=why)

    def _change_adapters(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        raise AssertionError("the service refuses adapters that it cannot load")

    def _waiting_of_streams(self, parts: Iterable[tuple[bytes, int]]) -> dict[int, int]:
        """As in `EngineStatus`. `parts`: ids of attempts, and tokens of their prompts not yet computed."""
        waiting = Counter[int]()
        for attempt_id, tokens in parts:
            attempt = self._attempts.find(attempt_id)
            if attempt is not None and attempt.stream is not None:
                waiting[attempt.stream] += tokens
        return dict(waiting)
