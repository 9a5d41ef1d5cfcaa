import pytest

from berth.binding.redact import REDACTED, keep_environment, redact_arguments, redact_text


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--token", "abc"], ["--token", REDACTED]),
        (["--hf-token=abc"], ["--hf-token=REDACTED"]),
        (["--api-key", "k", "--lr", "1"], ["--api-key", REDACTED, "--lr", "1"]),
        (["-password", "p"], ["-password", REDACTED]),
        (["PASSWORD=a b\nc"], ["PASSWORD=REDACTED"]),
        (["hfToken=x"], ["hfToken=REDACTED"]),
        (["secret:x"], ["secret:REDACTED"]),
        (["https://user:pw@host/path"], [f"https://{REDACTED}@host/path"]),
        (["postgres://u:p@h:1/d?x=1"], [f"postgres://{REDACTED}@h:1/d?x=1"]),
        (["hf_abcdefghijklmnop"], [REDACTED]),
        (["run ghp_0123456789abcdef now"], [f"run {REDACTED} now"]),
    ],
)
def test_secrets_are_replaced(arguments: list[str], shown: list[str]) -> None:
    assert redact_arguments(arguments) == shown


@pytest.mark.parametrize(
    "argument",
    ["--max-tokens=100", "--tokenizer=llama", "--max-tokens", "train.py", "--author=me", "a:b", "https://host/a@b"],
)
def test_what_is_no_secret_stays(argument: str) -> None:
    assert redact_arguments([argument, "value"]) == [argument, "value"]


def test_option_without_a_value_hides_no_other_option() -> None:
    assert redact_arguments(["--token", "--lr", "0.1"]) == ["--token", "--lr", "0.1"]


def test_environment_keeps_only_what_decides_about_cpus_and_devices() -> None:
    kept = keep_environment(
        {
            "RANK": "3",
            "OMP_PROC_BIND": "TRUE",
            "ASCEND_RT_VISIBLE_DEVICES": "0,1",
            "MASTER_ADDR": "tcp://user:pw@host",
            "HF_TOKEN": "hf_secret",
            "PATH": "/bin",
            "AWS_SECRET_ACCESS_KEY": "x",
            "XRANK": "1",
        }
    )
    assert kept == {
        "ASCEND_RT_VISIBLE_DEVICES": "0,1",
        "MASTER_ADDR": f"tcp://{REDACTED}@host",
        "OMP_PROC_BIND": "TRUE",
        "RANK": "3",
    }


def test_long_text_takes_no_long_time() -> None:
    for text in ("a-" * 500_000, "a" * 1_000_000, "token" * 200_000, "x:" * 500_000, "a://" * 200_000):
        assert redact_text(text) == text
