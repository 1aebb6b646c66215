"""Every error that moaspec raises on purpose.

MoaSpecError
├── InputError               what the caller passed is wrong (command line: exit code 2)
│   ├── PromptError          empty, or token ids outside the vocabulary
│   │   └── ContextError     too long for the target
│   ├── ShapeError           impossible tree or chain sizes, tensors of the wrong shape
│   └── UnknownModelError    no alias, directory or hub model of that name can be used
├── CheckpointError          a drafter checkpoint cannot be used (command line: exit code 2)
│   ├── CorruptCheckpointError   truncated, unreadable, missing tensors, NaN weights
│   └── MismatchError        the checkpoint belongs to another target
├── UnsupportedTargetError   keys and values of this family cannot be captured
├── ServingError             a server's version or settings cannot serve this drafter
├── DataError                training data is malformed
├── TrainingError            training cannot go on (for example a loss that is not finite)
├── HubError                 the model hub cannot be reached or refuses (exit code 1)
├── BusyError                a server has no room for another request now
├── ServerError              a server that was asked answers with an error, or not at all
├── WireError                a message between device and server is malformed or too long (exit 1)
└── RemoteError              a session with a server cannot go on (exit code 1)
    ├── LinkError            there is no connection, or it broke
    └── RefusedError         the server refuses: credentials, another model, a limit
"""


class MoaSpecError(Exception):
    """Base of all errors of this package."""


class InputError(MoaSpecError, ValueError):
    """An argument is wrong; the message says which, what was expected and what to do."""


class PromptError(InputError):
    """The prompt is empty, too long for the target, or has ids outside its vocabulary."""


class ContextError(PromptError):
    """The prompt leaves no room in the target's context."""


class ShapeError(InputError):
    """Sizes that no drafting tree, or no tensor of this model, can have."""


class UnknownModelError(InputError):
    """The name is no alias, directory or reachable hub model, or its files cannot be used."""


class CheckpointError(MoaSpecError):
    """A drafter checkpoint cannot be used."""


class CorruptCheckpointError(CheckpointError):
    """The checkpoint's files are truncated, unreadable, incomplete or not finite."""


class MismatchError(CheckpointError):
    """The checkpoint was made for a target other than the one it is used with."""


class UnsupportedTargetError(MoaSpecError):
    """The target's keys and values cannot be captured, so it cannot be drafted for."""


class ServingError(MoaSpecError):
    """vLLM, as it is installed or configured, cannot serve this drafter; the message says why."""


class DataError(MoaSpecError):
    """Training data is malformed; the message names file and line."""


class TrainingError(MoaSpecError):
    """Training cannot continue; the last checkpoint is intact."""


class HubError(MoaSpecError):
    """The model hub cannot be reached, or refuses what was asked of it."""


class BusyError(MoaSpecError):
    """No room for another request now; try again later.

    Args:
        retry_s: seconds after which there is probably room.
    """

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class ServerError(MoaSpecError):
    """A server that was asked cannot be reached, refuses, or failed."""


class WireError(MoaSpecError):
    """A message between device and server is malformed, or larger than it may be."""


class RemoteError(MoaSpecError):
    """A session with a server cannot go on."""


class LinkError(RemoteError):
    """There is no connection to the server, or it broke."""


class RefusedError(RemoteError):
    """The server refuses the session; the message says why."""
