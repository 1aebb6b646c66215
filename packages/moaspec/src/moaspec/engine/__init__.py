"""The decoding loop: requests join, are drafted for and verified in rounds, and leave."""
