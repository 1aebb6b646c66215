"""Environment variables with a closed set of values."""

import pytest

from moaspec_core.support.switches import setting

NAME = "MOASPEC_SWITCH_OF_A_TEST"


@pytest.mark.parametrize(
    ("value", "meaning"),
    [("", ""), ("off", "off"), ("OFF", "off"), ("0", "off"), ("False", "off"), ("A", "a")],
)
def test_known_values(
    value: str, meaning: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert setting(NAME, "a", "b") == ""
    monkeypatch.setenv(NAME, value)
    assert setting(NAME, "a", "b") == meaning
    assert caplog.messages == []


def test_another_value_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NAME, "banana")
    assert setting(NAME) == ""
    assert setting(NAME) == ""
    assert caplog.messages == [f"{NAME}=banana is ignored; it must be off or unset."]
