"""What people reported about binders, each with the outcome that they would have needed."""

import msgspec
import pytest

from berth.binding.options import PlanOptions
from berth.binding.plan import make_plan
from berth.binding.plan_document import Action, Plan, decode_plan, encode_plan
from berth.binding.thread_places import parse_thread_classes
from berth.errors import MalformedError
from binding.builder import ONE_GIB_OF_PAGES, Host, cpus, played, regular


def plan_of(host: Host, **options: object) -> Plan:
    return make_plan(host.snapshot(), PlanOptions(**options))  # type: ignore[arg-type]


def actions_of(host: Host, **options: object) -> dict[int, Action]:
    return {action.pid: action for action in plan_of(host, **options).apply_actions}


def targets_of(host: Host, **options: object) -> dict[int, str]:
    return {pid: action.target_cpu_list for pid, action in actions_of(host, **options).items()}


def rules_of(plan: Plan) -> set[str]:
    return {finding.id for finding in plan.findings}


def skipped_of(plan: Plan) -> dict[int, str]:
    return {entry.pid: entry.finding for entry in plan.skipped}


def two_nodes(**options: object) -> Host:
    """Return two nodes, 0-7,16-23 and 8-15,24-31, with an NPU on each."""
    host = regular(nodes=2, cores=8, **options)
    host.npu(0, "0-7,16-23")
    host.npu(1, "8-15,24-31")
    return host


def a2() -> Host:
    """Return eight nodes of 24 CPUs whose even ones have two NPUs each, as on a server of the A2 series."""
    host = regular(nodes=8, cores=24, smt=1)
    for number in range(8):
        host.npu(number, str(host.nodes[number // 2 * 2]))
    return host


# --- the limit is the cpuset, and the place is what the accelerator says -------------------------------------------


def test_mask_of_openmp_is_no_limit() -> None:
    host = regular(nodes=2, cores=4, smt=1)
    host.npu(0, "4-7")
    host.process(100, "0", threads=9, npu=0, environment={"OMP_PROC_BIND": "TRUE"})
    plan = plan_of(host)
    (action,) = plan.apply_actions
    assert action.target_cpu_list == "4-7"
    assert action.effective_cpu_list == "0-7"
    assert action.risk == plan.risk_level == "high"
    assert "widens a mask from 0 to 4-7" in action.reason
    assert "OMP_PROC_BIND=TRUE" in action.reason
    assert "pin its own threads again" in action.reason
    assert any(advice.topic == "omp" and "OMP_PROC_BIND=false" in advice.text for advice in plan.advice)


def test_services_on_npus_that_share_cpus_get_disjoint_halves() -> None:
    host = a2()
    host.process(100, npu=6)
    host.process(200, npu=7)
    targets = targets_of(host)
    assert targets == {100: "144-155", 200: "156-167"}


@pytest.mark.parametrize(("npu", "target"), [(6, "144-155"), (7, "156-167")])
def test_services_planned_apart_get_the_same_halves(npu: int, target: str) -> None:
    host = a2()
    host.process(100, npu=npu)
    host.process(300, "150", target=False, npu=13 - npu, comm="other-service")
    (action,) = plan_of(host).apply_actions
    assert action.target_cpu_list == target
    assert f"stays free for NPU {13 - npu}, which no target uses" in action.reason


def test_npu_whose_users_have_their_own_cpuset_takes_nothing_from_others() -> None:
    host = regular(nodes=1, cores=48, smt=1)
    host.npu(0, "24-47")
    host.npu(1, "24-47", host_pids=[300])
    host.process(100, npu=0)
    assert targets_of(host) == {100: "24-35"}
    host.process(300, cpuset="0-23", target=False)
    assert targets_of(host) == {100: "24-47"}


def test_idle_npu_with_cpus_elsewhere_takes_nothing_either() -> None:
    host = regular(nodes=1, cores=48, smt=1)
    host.npu(0, "0-47")
    host.npu(1, "0-47")
    host.process(100, "24", cpuset="24-47", npu=0)
    assert targets_of(host) == {100: "24-47"}


def test_two_processes_on_one_npu_share_its_part() -> None:
    host = a2()
    host.process(100, npu=6)
    host.process(101, npu=6)
    host.process(200, npu=7)
    assert targets_of(host) == {100: "144-149", 101: "150-155", 200: "156-167"}


def test_occupants_are_shown() -> None:
    host = two_nodes()
    host.process(100, npu=0)
    host.process(300, "2-3", target=False, comm="agent")
    host.process(301, "8", target=False, comm="elsewhere")
    plan = plan_of(host)
    assert [(one.pid, one.cpu_list, one.shared_with) for one in plan.occupants] == [(300, "2-3", [100])]
    assert "shared with pid 300 (agent)" in plan.apply_actions[0].reason


def test_ranks_without_a_known_npu_are_not_sent_to_the_first_node() -> None:
    host = two_nodes()
    for rank in range(16):
        host.process(100 + rank, rank=rank)
    plan = plan_of(host)
    assert plan.apply_actions == []
    assert skipped_of(plan) == dict.fromkeys(range(100, 116), "R020")
    assert "R020" in rules_of(plan)
    assert plan.summary == "Nothing is planned. 16 processes left alone: see R020."


def test_dies_are_named_by_logic_id_not_by_card() -> None:
    """Eight cards of two dies each: die 1 of card 1 is chip logic id 3."""
    host = regular(nodes=8, cores=4)
    for die in range(16):
        host.npu(die, str(host.nodes[die // 2]), device_id=die // 2, chip_id=die % 2)
    host.process(100, npu=3)
    host.process(200, npu=2)
    assert targets_of(host) == {100: "6-7,38-39", 200: "4-5,36-37"}


def test_two_dies_under_one_name_are_not_guessed() -> None:
    host = regular(nodes=2, cores=4)
    host.npu(None, "0-3,8-11", device_id=1, chip_id=0)
    host.npu(None, "4-7,12-15", device_id=1, chip_id=1)
    host.process(100, npu=1)
    plan = plan_of(host)
    assert plan.apply_actions == []
    assert skipped_of(plan) == {100: "R019"}


def test_card_id_counts_where_no_source_has_logic_ids() -> None:
    host = regular(nodes=2, cores=4)
    for card in (4, 5):
        host.npu(None, str(host.nodes[card - 4]), device_id=card)
    host.process(100, npu=5)
    assert targets_of(host) == {100: "4-7,12-15"}


def test_npu_comes_from_the_process_not_from_its_rank() -> None:
    host = two_nodes()
    host.npus[1] = msgspec.structs.replace(host.npus[1], host_pids=[100])
    host.process(100, rank=0)
    assert targets_of(host) == {100: "8-15,24-31"}


def test_device_that_is_not_the_one_in_use_stops_the_action() -> None:
    host = two_nodes()
    host.npus[1] = msgspec.structs.replace(host.npus[1], host_pids=[100])
    host.process(100, rank=0, npu=0)
    plan = plan_of(host)
    assert plan.apply_actions == []
    assert skipped_of(plan) == {100: "R019"}


def test_npu_smi_names_pids_of_the_host() -> None:
    host = two_nodes()
    host.npus[1] = msgspec.structs.replace(host.npus[1], host_pids=[4_000_123])
    host.process(7, nspid_chain=[4_000_123, 7])
    assert targets_of(host) == {7: "8-15,24-31"}


def test_npu_numbers_may_have_gaps() -> None:
    host = regular(nodes=2, cores=4)
    for number in (3, 4):
        host.npu(number, str(host.nodes[number - 3]))
    host.process(100, npu=4)
    host.process(200, npu=3)
    assert targets_of(host) == {100: "4-7,12-15", 200: "0-3,8-11"}


def test_near_cpus_in_two_ranges_on_two_nodes_count_whole() -> None:
    host = regular(nodes=4, cores=4)
    host.npu(0, "0-3,8-11")
    host.process(100, npu=0)
    assert targets_of(host) == {100: "0-3,8-11"}


def test_node_of_an_npu_is_near_it_unless_nodes_cannot_be_trusted() -> None:
    host = Host(["0", "1", "2", "3"], {0: "0-1", 1: "2-3"})
    host.npu(0, numa_node=1)
    host.process(100, npu=0)
    assert targets_of(host) == {100: "2-3"}
    host.nodes[0] = cpus("0-2")
    assert targets_of(host) == {}


def test_npu_wholly_outside_the_cpuset_widens_nothing() -> None:
    host = two_nodes()
    host.process(100, "8-9", cpuset="8-15", npu=0)
    plan = plan_of(host)
    assert plan.apply_actions == []
    assert skipped_of(plan) == {100: "R017"}
    assert "R017" in rules_of(plan)


def test_node_without_cpus_gets_nobody() -> None:
    """One node with CPUs and eight of accelerator memory, as on a GH200."""
    host = Host([str(cpu) for cpu in range(8)], {0: "0-7", **dict.fromkeys(range(1, 9), "")})
    for rank in range(4):
        host.process(100 + rank, rank=rank)
    assert targets_of(host) == {100: "0-1", 101: "2-3", 102: "4-5", 103: "6-7"}
    assert targets_of(host, policy="spread") == targets_of(host)


def test_uneven_cpuset_and_few_cpus_are_said_before_anything_is_done() -> None:
    host = two_nodes()
    host.process(100, "0-6,8", cpuset="0-6,8", npu=0)
    host.process(200, "0-6,8", cpuset="0-6,8", npu=1)
    plan = plan_of(host)
    assert {action.pid: action.target_cpu_list for action in plan.apply_actions} == {100: "0-6", 200: "8"}
    assert next(finding for finding in plan.findings if finding.id == "R024").pids == [200]


def test_instances_with_fewer_ranks_than_nodes_and_more_do_not_overlap() -> None:
    for ranks in (1, 2, 3, 5):
        host = two_nodes()
        for rank in range(ranks):
            host.process(100 + rank, rank=rank, npu=rank % 2)
        taken = [cpus(target) for target in targets_of(host).values()]
        assert len(taken) == ranks
        assert sum(map(len, taken)) == len({cpu for target in taken for cpu in target})


def test_tools_that_are_missing_stop_no_plan() -> None:
    host = two_nodes()
    host.process(100, npu=0)
    for tool in ("numactl", "taskset", "npu_topology"):
        host.gap(tool)
    assert targets_of(host) == {100: "0-7,16-23"}


@pytest.mark.parametrize(
    ("component", "kind", "pid", "planned"),
    [
        ("processes.threads", "missing", 100, {200}),
        ("processes.threads", "partial", 100, {200}),
        ("cgroup.cpuset_cpus_effective", "errors", 200, {100}),
        ("cgroup.cpuset_cpus_effective", "partial", 200, {100, 200}),
        ("cpu_topology", "missing", None, set()),
        ("runtime_sample", "missing", None, {100, 200}),
    ],
)
def test_no_plan_from_half_a_snapshot(component: str, kind: str, pid: int | None, planned: set[int]) -> None:
    host = two_nodes()
    host.process(100, npu=0)
    host.process(200, npu=1)
    host.gap(component, kind=kind, pid=pid)
    plan = plan_of(host)
    assert {action.pid for action in plan.apply_actions} == planned
    assert set(skipped_of(plan)) == {100, 200} - planned
    assert "R010" in rules_of(plan)


def test_cores_that_are_not_known_are_not_dealt() -> None:
    host = two_nodes()
    host.process(100, npu=0)
    host.cores = host.cores[1:]
    assert targets_of(host) == {100: "1-7,17-23"}
    host.cores = []
    assert skipped_of(plan_of(host)) == {100: "R010"}


def test_every_skipped_process_has_its_finding() -> None:
    host = two_nodes(isolated="8-15,24-31")
    host.process(100, npu=0, kernel_thread=True)
    host.process(101, npu=0, cpuset=None)
    host.process(102)
    host.process(103, npu=1)
    host.process(104, npu=0, cpuset="8")
    host.process(105, state="Z")
    plan = plan_of(host)
    assert skipped_of(plan) == {100: "R022", 101: "R010", 102: "R020", 103: "R021", 104: "R017", 105: "R022"}
    findings = {finding.id: finding.pids for finding in plan.findings}
    for pid, rule in skipped_of(plan).items():
        assert pid in findings[rule]


# --- families -------------------------------------------------------------------------------------------------------


def test_dataloader_workers_follow_their_parent_and_the_parent_goes_first() -> None:
    host = regular(nodes=1, cores=8, smt=1)
    for worker in range(4):
        host.process(50 + worker, "1", parent=100, comm="pt_data_worker")
    host.process(100, "1")
    plan = plan_of(host)
    assert [action.pid for action in plan.apply_actions] == [100, 50, 51, 52, 53]
    assert {action.target_cpu_list for action in plan.apply_actions} == {"0-7"}
    assert {action.risk for action in plan.apply_actions} == {"medium"}
    assert [finding.id for finding in plan.findings] == ["R013"]


def test_children_that_inherit_a_rank_are_no_rank() -> None:
    host = two_nodes()
    host.process(100, npu=0, rank=0)
    host.process(101, npu=0, rank=0, parent=100, target=False)
    host.process(102, npu=0, rank=1)
    assert targets_of(host) == {100: "0-3,16-19", 101: "0-3,16-19", 102: "4-7,20-23"}


def test_launcher_gets_no_part_of_what_its_ranks_need() -> None:
    host = regular(nodes=1, cores=8, smt=1)
    host.process(10, comm="torchrun")
    for rank in range(2):
        host.process(20 + rank, rank=rank, parent=10)
    plan = plan_of(host)
    assert {action.pid: action.target_cpu_list for action in plan.apply_actions} == {20: "0-3", 21: "4-7"}
    assert skipped_of(plan) == {10: "R023"}


def test_child_in_a_narrower_cpuset_gets_what_it_may() -> None:
    host = two_nodes()
    host.process(100, npu=0)
    host.process(101, parent=100, cpuset="0-1,30", target=False)
    host.process(102, parent=100, cpuset="30", target=False)
    plan = plan_of(host)
    assert {action.pid: action.target_cpu_list for action in plan.apply_actions} == {100: "0-7,16-23", 101: "0-1"}
    assert skipped_of(plan) == {102: "R021"}


# --- policies -------------------------------------------------------------------------------------------------------


def test_exclusive_gives_cores_where_nothing_is_near() -> None:
    host = regular(nodes=2, cores=2)
    host.process(100)
    host.process(200)
    assert targets_of(host) == {}
    actions = actions_of(host, policy="exclusive")
    assert {pid: action.target_cpu_list for pid, action in actions.items()} == {100: "0-1,4-5", 200: "2-3,6-7"}
    assert "nothing says what is near" in actions[100].reason


def test_exclusive_parts_children_that_are_targets() -> None:
    host = regular(nodes=1, cores=4)
    host.process(100)
    host.process(101, parent=100)
    host.process(102, parent=100, target=False)
    assert targets_of(host, policy="exclusive") == {100: "0-1,4-5", 101: "2-3,6-7", 102: "0-1,4-5"}
    assert targets_of(host) == {}


def test_exclusive_never_uses_a_core_that_the_cpuset_cuts() -> None:
    host = regular(nodes=1, cores=4)
    host.process(100, cpuset="0-2,4-5")
    assert targets_of(host, policy="exclusive") == {100: "0-1,4-5"}
    host.process(101, cpuset="0-2,4-5")
    host.process(102, cpuset="0-2,4-5")
    plan = plan_of(host, policy="exclusive")
    assert plan.apply_actions == []
    assert set(skipped_of(plan).values()) == {"R021"}


def test_spread_deals_whole_cores_over_nodes() -> None:
    host = regular(nodes=2, cores=4)
    for rank in range(2):
        host.process(100 + rank, rank=rank)
    assert targets_of(host, policy="spread") == {100: "0-1,4-5,8-9,12-13", 101: "2-3,6-7,10-11,14-15"}


def test_reserved_isolated_and_offline_cpus_go_to_nobody() -> None:
    host = regular(nodes=1, cores=8, smt=1, isolated="6", offline="7")
    host.npu(0, "0-7")
    host.process(100, "0-5", cpuset="0-7", npu=0)
    assert targets_of(host, reserve=cpus("0-1")) == {100: "2-5"}
    assert targets_of(host) == {}


def test_more_ranks_than_cores_split_cores_and_say_so() -> None:
    host = regular(nodes=1, cores=2)
    for rank in range(4):
        host.process(100 + rank, rank=rank)
    actions = actions_of(host)
    assert {action.target_cpu_list for action in actions.values()} == {"0", "1", "2", "3"}
    assert "cores are split" in actions[100].reason


def test_more_ranks_than_cpus_get_nothing() -> None:
    host = regular(nodes=1, cores=2)
    for rank in range(5):
        host.process(100 + rank, rank=rank)
    plan = plan_of(host)
    assert plan.apply_actions == []
    assert set(skipped_of(plan).values()) == {"R021"}


def test_rank_with_room_is_not_held_back_by_ranks_without() -> None:
    host = regular(nodes=2, cores=2, smt=1)
    host.npu(0, "0")
    host.npu(1, "0")
    host.npu(2, "0-3")
    for rank in range(3):
        host.process(100 + rank, rank=rank, npu=rank)
    plan = plan_of(host)
    assert {action.pid: action.target_cpu_list for action in plan.apply_actions} == {102: "1-3"}
    assert skipped_of(plan) == {100: "R021", 101: "R021"}


def test_cores_of_one_and_two_threads() -> None:
    host = Host(["0,1", "2,3", "4", "5", "6", "7"], {0: "0-7"})
    for rank in range(2):
        host.process(100 + rank, rank=rank)
    taken = [cpus(target) for target in targets_of(host).values()]
    assert [len(target) for target in taken] == [4, 4]
    assert all((0 in target) == (1 in target) and (2 in target) == (3 in target) for target in taken)


def test_good_deal_of_the_user_is_kept() -> None:
    host = regular(nodes=1, cores=4)
    host.process(100, "2-3,6-7", rank=0)
    host.process(101, "0-1,4-5", rank=1)
    plan = plan_of(host)
    assert plan.apply_actions == []
    assert plan.risk_level == "info"
    assert plan.summary == "Nothing to gain: 2 processes in place already."


def test_snapshot_without_targets() -> None:
    host = two_nodes()
    host.process(100, target=False)
    assert plan_of(host).summary == "Nothing is planned: the snapshot has no target."


# --- risk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "fields", "risk", "said"),
    [
        ("0-31", {}, "low", ""),
        ("8-15,24-31", {}, "medium", "leaves the mask 8-15,24-31"),
        ("0-1", {}, "medium", "widens a mask from 0-1 to 0-7,16-23"),
        ("8-15,24-31", {"pages_by_node": {"1": ONE_GIB_OF_PAGES}}, "high", "memory stays behind"),
    ],
)
def test_risk_of_a_move(mask: str, fields: dict[str, object], risk: str, said: str) -> None:
    host = two_nodes()
    host.process(100, mask, npu=0, **fields)
    (action,) = plan_of(host).apply_actions
    assert action.risk == risk
    assert said in action.reason


def test_threads_that_had_masks_of_their_own_are_named_as_a_risk() -> None:
    host = two_nodes()
    host.process(100, "0-31", threads=[("acl_thread", "3"), ("worker", "0-31")], npu=0)
    (action,) = plan_of(host).apply_actions
    assert action.risk == "medium"
    assert not action.current_uniform
    assert "1 thread had another mask" in action.reason


# --- commands -------------------------------------------------------------------------------------------------------


def test_commands_move_every_thread_and_restore_a_process_that_nothing_bound() -> None:
    host = two_nodes(offline="31")
    host.process(100, npu=0, threads=3)
    host.process(200, "0-1", npu=1)
    actions = actions_of(host)
    assert actions[100].apply_command == "taskset -acp 0-7,16-23 100"
    assert actions[100].rollback_command == "taskset -acp 0-31 100"
    assert actions[200].apply_command == "taskset -cp 8-15,24-30 200"
    assert actions[200].rollback_command == "taskset -cp 0-1 200"


def test_what_taskset_cannot_do_is_left_to_berth() -> None:
    host = two_nodes()
    host.process(100, "0-31", threads=[("worker", "3")], npu=0)
    action = actions_of(host, state_ref="my state.json")[100]
    assert action.apply_command == "taskset -acp 0-7,16-23 100"
    assert action.rollback_command == "berth bind rollback 'my state.json' --action bind-pid-100"
    assert action.rollback_cpu_list is None
    fixed = msgspec.structs.replace(host.processes[0].threads[1], movable=False)
    host.processes[0] = msgspec.structs.replace(
        host.processes[0], threads=[host.processes[0].threads[0], fixed], num_threads=2
    )
    action = actions_of(host)[100]
    assert action.apply_command == "berth bind apply plan.json --action bind-pid-100"
    assert action.threads == 1


def test_commands_of_the_other_executors() -> None:
    host = two_nodes()
    host.process(100, npu=0, threads=2)
    script = actions_of(host, executor="internal-script", script="/opt/our bind")[100]
    reason = "'near NPU 0 (sysfs)'"
    assert script.apply_command == f"'/opt/our bind' --apply --pid 100 --cpu-list 0-7,16-23 --reason {reason}"
    assert script.rollback_command == (
        "'/opt/our bind' --rollback --pid 100 --cpu-list 0-31 --state rollback-state.json"
    )
    native = actions_of(host, executor="native")[100]
    assert native.executor_backend == "native"
    assert native.apply_command == "berth bind apply plan.json --action bind-pid-100"
    assert native.rollback_command == "berth bind rollback rollback-state.json --action bind-pid-100"


def test_rights_and_identity_are_said_up_front() -> None:
    host = two_nodes()
    host.process(100, npu=0, uid=1234, start_ticks=77)
    plan = plan_of(host)
    assert plan.apply_actions[0].rights == "uid 1234, or CAP_SYS_NICE"
    assert plan.apply_actions[0].start_ticks == 77
    (preview,) = plan.rollback_state_preview.actions
    assert preview.process_start_time == 77
    assert preview.before.cpus_allowed_list == "0-31"
    assert preview.after.cpus_allowed_list is None
    assert (plan.boot_id, plan.requires_confirmation) == ("boot", True)


# --- thread classes -------------------------------------------------------------------------------------------------

THREADS = [("acl_thread", "0-31"), ("release_thread", "0-31"), ("dev0_sq_task", "0-31"), ("worker", "0-31")]


def test_classes_of_threads_get_their_own_cores() -> None:
    host = two_nodes()
    host.process(100, "0-31", threads=THREADS, npu=0)
    plan = plan_of(host, thread_classes=parse_thread_classes("acl=1,release=1,sq=25%,communication=3"))
    (action,) = plan.apply_actions
    assert {target.name: target.target_cpu_list for target in action.thread_targets} == {
        "python": "0-3,16-19",
        "worker": "0-3,16-19",
        "acl_thread": "4,20",
        "release_thread": "5,21",
        "dev0_sq_task": "6-7,22-23",
    }
    assert action.target_cpu_list == "0-7,16-23"
    assert action.apply_command == "berth bind apply plan.json --action bind-pid-100"
    assert action.rollback_command == "taskset -acp 0-31 100"
    assert plan.thread_classes == {"acl": "1", "release": "1", "sq": "25%", "communication": "3"}
    again = make_plan(
        played(host.snapshot(), plan), PlanOptions(thread_classes=parse_thread_classes("acl=1,release=1,sq=25%"))
    )
    assert again.apply_actions == []


def test_dataloader_processes_are_a_class_too() -> None:
    host = two_nodes()
    host.process(100, npu=0)
    host.process(101, parent=100, comm="pt_data_worker", target=False)
    assert targets_of(host, thread_classes=parse_thread_classes("dataloader=6")) == {
        100: "0-1,16-17",
        101: "2-7,18-23",
    }


def test_classes_that_do_not_fit_are_said() -> None:
    host = two_nodes()
    host.process(100, "0-31", threads=THREADS, npu=0)
    plan = plan_of(host, thread_classes=parse_thread_classes("acl=7,release=1"))
    assert plan.apply_actions[0].thread_targets == []
    assert plan.apply_actions[0].target_cpu_list == "0-7,16-23"
    assert "R025" in rules_of(plan)


@pytest.mark.parametrize("text", ["acl", "acl=0", "acl=1,acl=2", "openmp=1", "acl=100%", "acl=-1", "acl=1.5"])
def test_bad_thread_classes(text: str) -> None:
    with pytest.raises(MalformedError, match="CLASS=CORES"):
        parse_thread_classes(text)


def test_script_cannot_bind_threads() -> None:
    with pytest.raises(MalformedError) as caught:
        PlanOptions(executor="internal-script", thread_classes=parse_thread_classes("acl=1"))
    assert caught.value.name == "thread-classes-need-threads"


# --- advice and the document ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caller", "command"),
    [(None, "numactl --all -C 0-7,16-23"), ("8-9", "numactl --all -C 0-7,16-23"), ("0-31", "numactl -C 0-7,16-23")],
)
def test_numactl_is_told_to_go_beyond_the_mask_of_the_shell(caller: str | None, command: str) -> None:
    host = two_nodes()
    host.process(100, npu=0)
    plan = plan_of(host, caller_mask=None if caller is None else cpus(caller))
    (advice,) = [advice for advice in plan.advice if advice.topic == "numactl"]
    assert command in advice.text


def test_memory_advice_is_one_for_each_process_and_names_the_right_it_lacks() -> None:
    host = two_nodes()
    pages = {"1": ONE_GIB_OF_PAGES}
    host.process(100, npu=0, threads=40, pages_by_node=pages, cap_sys_nice=False, in_container=True)
    host.process(200, npu=1, threads=40, pages_by_node=pages)
    plan = plan_of(host)
    memory = [advice for advice in plan.advice if advice.topic == "memory"]
    assert [(advice.pids, advice.text) for advice in memory] == [([100], "migratepages 100 1 0")]
    assert "needs SYS_NICE" in memory[0].risk
    assert {action.pid for action in plan.apply_actions} == {100, 200}


def test_memory_is_never_sent_to_a_node_without_any() -> None:
    host = regular(nodes=2, empty=[0])
    host.npu(0, "0-7,16-23")
    host.process(100, npu=0, pages_by_node={"1": ONE_GIB_OF_PAGES})
    assert [advice.topic for advice in plan_of(host).advice] == ["numactl", "irq"]


def test_every_advice_has_reason_risk_and_metric() -> None:
    host = two_nodes()
    host.pytorch = {"dataloader": {"workers": 32}}
    host.system["irqbalance_running"] = True
    host.process(
        100, npu=0, pages_by_node={"1": ONE_GIB_OF_PAGES}, environment={"OMP_NUM_THREADS": "64"}, cap_sys_nice=False
    )
    plan = plan_of(host)
    assert [advice.topic for advice in plan.advice] == ["numactl", "omp", "dataloader", "memory", "irq"]
    assert all(advice.reason and advice.risk and advice.metric for advice in plan.advice)
    assert "OMP_NUM_THREADS=8" in plan.advice[1].text
    assert "irqbalance" in plan.advice[4].risk


def test_document_survives_a_round_trip_and_nothing_else_does() -> None:
    host = two_nodes()
    host.process(100, npu=0)
    plan = plan_of(host)
    data = encode_plan(plan)
    assert decode_plan(data, source="plan.json") == plan
    for damaged in (b"", data[:-20], b"[]", data.replace(b'"policy"', b'"police"')):
        with pytest.raises(MalformedError) as caught:
            decode_plan(damaged, source="plan.json")
        assert caught.value.name == "bad-plan"
    with pytest.raises(MalformedError) as caught:
        decode_plan(data.replace(b'"schema_version": "0.2.0"', b'"schema_version": "0.3.0"', 1), source="plan.json")
    assert caught.value.name == "unknown-plan-version"


def test_recommendations_and_rollbacks_mirror_findings_and_actions() -> None:
    host = two_nodes()
    host.process(100, npu=0)
    host.process(200, "3", threads=3, npu=1)
    plan = plan_of(host)
    assert {one.source_finding for one in plan.recommendations} == rules_of(plan)
    assert [one.action_id for one in plan.rollback_actions] == [one.action_id for one in plan.apply_actions]
    assert [one.rollback_command for one in plan.rollback_actions] == ["taskset -cp 0-31 100", "taskset -acp 3 200"]
