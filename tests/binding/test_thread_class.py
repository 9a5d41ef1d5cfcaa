import pytest

from berth.binding.thread_class import role_of


@pytest.mark.parametrize(
    ("name", "found", "score"),
    [
        ("dev0_sq_task", "sq", 95),
        ("DEV12_SQ", "sq", 95),
        ("hccl_watchdog", "communication", 85),
        ("hcom_thread", "communication", 85),
        ("NCCL Progress 1", "communication", 85),
        ("acl_thread", "acl", 80),
        ("pt_autograd_0", "acl", 80),
        ("release_thread", "release", 80),
        ("pt_data_worker", "dataloader", 70),
        ("DataLoader-1", "dataloader", 70),
        ("tokenizer_pool", "tokenizer", 60),
        ("python3", "other", 0),
        ("dev0_squid", "other", 0),
        ("", "other", 0),
    ],
)
def test_class_of_a_name(name: str, found: str, score: int) -> None:
    role = role_of(name, is_main=False)
    assert (role.name, role.score) == (found, score)


def test_main_thread_is_main_whatever_it_is_called() -> None:
    assert role_of("hccl_watchdog", is_main=True).name == "main"
