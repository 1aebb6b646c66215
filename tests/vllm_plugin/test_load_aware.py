"""Draft lengths by the speed of a vLLM whose steps take a time that the test knows."""

from __future__ import annotations

from collections import Counter

from moaspec.vllm_plugin.load_aware import LoadAwareLength


class Steps:
    """Steps of 10 ms for up to 16 tokens, 1 ms for each further one and 0.5 ms for each draft.

    Attributes:
        now_s: its clock.
        taken: how often each length was drafted since the last look.
    """

    def __init__(self, longest: int = 3) -> None:
        self._chooser = LoadAwareLength(longest)
        self._lengths: list[int] = []
        self._drafted = 0
        self.now_s, self.taken = 0.0, Counter[int]()

    def decode(self, requests: int, number: int, *, accepted: float = 0.5) -> Counter[int]:
        """That many steps, of which a share accepts all drafts; the lengths of the later half."""
        if len(self._lengths) != requests:
            self.read([5] * requests)
        for step in range(number):
            self.now_s += 0.010 + 0.0005 * self._drafted
            self.now_s += 0.001 * max(0, requests * (1 + self._drafted) - 16)
            right = self._drafted if step % 10 < 10 * accepted else 0
            self._advance([1 + right] * requests)
            if step == number // 2:
                self.taken.clear()
        return self.taken

    def read(self, lengths: list[int]) -> None:
        """A step that reads prompts of other requests, for ten seconds."""
        self.now_s += 10.0
        self._lengths = lengths
        self._drafted = self._chooser.choose(lengths, [0] * len(lengths), self.now_s)

    def _advance(self, emitted: list[int]) -> None:
        self._lengths = [old + new for old, new in zip(self._lengths, emitted, strict=True)]
        self._drafted = self._chooser.choose(self._lengths, emitted, self.now_s)
        self.taken[self._drafted] += 1


def most(taken: Counter[int]) -> tuple[int, float]:
    """The most frequent length, and its share."""
    length, times = taken.most_common(1)[0]
    return length, times / taken.total()


def test_drafts_get_shorter_with_more_requests_and_longer_again() -> None:
    steps = Steps()
    for requests, length in ((1, 3), (32, 0), (1, 3), (64, 0), (4, 3)):
        found, share = most(steps.decode(requests, 600))
        assert found == length
        # Two other lengths are probed for four steps in 64 at first, in 256 and more later.
        assert share > 0.9


def test_a_length_that_no_longer_pays_is_given_up_and_tried_again() -> None:
    steps = Steps()
    for accepted, length in ((0.9, 3), (0.0, 0), (0.9, 3)):
        assert most(steps.decode(5, 3000, accepted=accepted))[0] == length


def test_steps_that_read_prompts_or_wait_do_not_count() -> None:
    steps = Steps()
    for number in range(100):
        steps.read([100 + number] * 2)
        steps.now_s += 10.0
        steps.read([200 + number] * 2)
    assert most(steps.decode(2, 60)) == (3, 1.0)
