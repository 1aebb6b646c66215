/** Limits of messages, equal to those of the server (`moaspec_core/support/limits.py`). */

/** Bytes of one message. */
export const MAX_FRAME_BYTES = 4 << 20;
/** Drafted tokens of one message. */
export const MAX_DRAFTED = 256;
/** Tokens that the server streams after one message. */
export const MAX_STREAMED = 32;
/** Ranges of positions in one message. */
export const MAX_RUNS = 4096;
/** Tokens in `logitBias`. */
export const MAX_LOGIT_BIAS = 4096;
/** Characters of a server's message that are shown to the user. */
export const MAX_MESSAGE = 500;
/** Received messages that wait until a draft step ends. */
export const MAX_WAITING_MESSAGES = 1024;
