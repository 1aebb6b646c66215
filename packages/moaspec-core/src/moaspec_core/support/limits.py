"""The limits of everything that one request may hold, for all protocols alike.

`docs/security.md` shows this table; a test compares the two.
"""

from typing import Any

# Characters of a grammar, made from a JSON schema or tools, or sent as it is.
MAX_GRAMMAR = 1 << 18
MAX_GRAMMAR_RULES = 2000  # Rules of a grammar and references of a JSON schema, together.
# Bytes of native stack to try a grammar on; this bounds chains of references and nesting.
MAX_GRAMMAR_STACK = 2 << 20
MAX_GRAMMAR_MEMORY = 1 << 30  # Bytes of address space of the process that tries a grammar.
MAX_GRAMMAR_S = 5  # Seconds of processor time that compiling a grammar may take.
# Parser states at one place of a text with a grammar; a text with more ends with an error.
MAX_GRAMMAR_ITEMS = 16000
# Seconds of processor time for the tokens that a grammar allows at one place; a text that takes
# longer ends with an error, as all others wait meanwhile.
MAX_MASK_S = 0.15
# Levels of nested objects and arrays in a JSON schema or in variables of a chat template.
MAX_JSON_DEPTH = 100

MAX_BODY_BYTES = 8 << 20  # Of an HTTP request's body.
# Bytes of the bodies of all HTTP requests under way; of one client, its equal part where others
# have some.
MAX_BODIES_BYTES = 256 << 20
# JSON values in an HTTP request's body; objects, lists and members of objects count four times.
MAX_JSON_VALUES = 1 << 18
MAX_FRAME_BYTES = 4 << 20  # Of a WebSocket message, in both directions.

MAX_MESSAGES = 4096  # Messages of a chat, or input items of a response.
MAX_PARTS = 1024  # Text parts of one message.
MAX_CALLS = 128  # Tool calls of one message.
MAX_TOOLS = 128  # Tools of one request.
MAX_PROMPTS = 64  # Prompts of one completion request.
MAX_CHOICES = 128  # `n` and `best_of`.

MAX_TOP_LOGPROBS = 20  # Alternatives per token, over HTTP.
MAX_STOP_STRINGS = 64  # Stop strings of one request.
MAX_STOP_CHARACTERS = 1024  # Characters of a stop string.
# Stop token ids of one request, over WebSockets; over HTTP the target's are taken.
MAX_STOP_TOKENS = 1024

MAX_LOGIT_BIAS = 4096  # Tokens in `logit_bias`.
# Token ids in each list of token rules (`suppress_tokens`, forced and stop tokens).
MAX_RULE_TOKENS = 1 << 14
MAX_WORDS = 1 << 12  # Forbidden words in token rules.
MAX_WORD_TOKENS = 256  # Tokens of one forbidden word.
MAX_WORDS_TOKENS = 1 << 16  # Tokens of all forbidden words together.

MAX_DRAFTED = 256  # Drafted tokens of one message, and of one verification.
# Their verdicts wait until the device reads: `MAX_WAITING` of the server's response_stream.py.
MAX_STREAMED = 32  # Tokens that the target chooses unasked after one message.
MAX_RUNS = 4096  # Runs of positions in one message.

# Requests whose prompts are tokenised at the same time, one of each client. Grammars of two clients
# are compiled beside them.
MAX_PREPARING = 4
# Requests of one client that may wait for that; as many as texts, `--max-active` and
# `--max-waiting` together, where these are more.
MAX_PREPARING_WAITING = 64

MAX_REQUEST_S = 10  # Seconds from the start of a WebSocket call until its request.
# Seconds of a WebSocket connection, after which its device makes another and shows its token again.
MAX_CONNECTION_S = 3600
MAX_SILENCE_S = 10  # Seconds without a message of a device; its heartbeats come every half second.
MAX_SEND_S = 10  # Seconds for a device to read one message.
MAX_MESSAGES_PER_S = 200  # Messages a second of one device's connection, on average over 5 s.

# Wrong tokens or keys that are answered late at the same time; more are answered at once.
MAX_WRONG_TOKENS = 64
WRONG_TOKEN_S = 0.2  # Seconds after which a wrong token or key is answered.

MAX_HTTP_CONNECTIONS = 1024  # HTTP connections of all clients, and as many WebSocket connections.
# HTTP connections of one address, and as many WebSocket connections.
MAX_HTTP_CONNECTIONS_PER_ADDRESS = 512

MAX_HANDSHAKE_S = 10  # Seconds for each of TLS and the handshake of a WebSocket.
# Frames a second of one WebSocket connection, control frames and fragments included, on average
# over 5 s.
MAX_WEBSOCKET_FRAMES_PER_S = 1000

MAX_STORED_RESPONSES = 256  # Responses kept for `previous_response_id`.
# Bytes of these as JSON. Above either limit the client that holds most loses its oldest.
MAX_STORED_BYTES = 64 << 20


def too_deep(value: Any) -> bool:
    """Whether a JSON value has more than `MAX_JSON_DEPTH` levels; never recurses."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        children = [_children(one) for one in level]
        level = [child for some in children for child in some if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
