"""Supervisors as an enemy meets them: processes killed, frozen and asked to stop at any moment, with stand-ins for the
training.

Whatever is done, `Nodes.check` holds at the end: each step stands once, no two generations were at work at once, no
process is left.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.mounts import exit_code_of, may_mount, mount, own_mounts
from tests.helpers.nodes import Nodes, Server, until

# Seconds before a node that returns is taken in
STEADY = {"constants": {"decide.STEADY": 0.5}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("server"))
    yield found
    found.end()


@pytest.mark.thorough
def test_a_rank_and_a_leader_are_killed_and_clocks_an_hour_apart_change_nothing_but_are_told(
    server, tmp_path
):
    with Nodes(server, tmp_path, steps=60) as nodes:
        n0, n1, n2 = (
            nodes.start(f"n{k}", clock=hours * 3600.0)[0]
            for k, hours in enumerate((0, 1, -1))
        )
        nodes.until_step(3)
        nodes.do(1, "kill")
        nodes.until_plan("running", 2)
        # The leader, which has the coordinator too.
        n0.kill()
        nodes.until_plan("running", 3)
        assert [n0.end(), n1.end(), n2.end()] == [-signal.SIGKILL, 0, 0], nodes.told()
        assert nodes.faults() == [("signal", ["n1"]), ("lost", ["n0"])], nodes.told()
        nodes.check(60)
        told = {
            (line["node"], round(line["ahead"] / 3600))
            for line in nodes.events("clock")
        }
        assert told >= {("n1", 1), ("n2", -1)}
        assert "the clock of n1 is 3600 s ahead" in n0.said


@pytest.mark.thorough
def test_a_node_that_is_paused_whole_keeps_no_lock_and_writes_no_more(server, tmp_path):
    with Nodes(server, tmp_path, nodes=2, steps=120) as nodes:
        started = nodes.start("n0", "n1", **STEADY)
        nodes.until_step(5)
        started[0].kill(signal.SIGSTOP)
        nodes.do(0, "frozen")
        assert nodes.until_plan("running", 2)["members"] == ["n1"]
        until(lambda: len(nodes.living()) <= 3, "the end of the frozen process")
        started[0].kill(signal.SIGCONT)
        assert nodes.until_plan("running", 3)["members"] == ["n0", "n1"]
        assert [node.end() for node in started] == [0, 0], nodes.told()
        assert nodes.faults() == [("lost", ["n0"]), ("grow", [])]
        assert "n0, which is silent, is ended" in started[1].said
        nodes.check(120)


@pytest.mark.thorough
def test_a_run_whose_lock_another_process_holds_waits_for_it(server, tmp_path):
    with Nodes(server, tmp_path, nodes=1, steps=10) as nodes:
        nodes.run.mkdir()
        holds = (
            f"import fcntl; f = open({str(nodes.run / '.lock')!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
            "print('held', flush=True); input()"
        )
        command = [sys.executable, "-c", holds]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            (node,) = nodes.start("n0")
            until(lambda: "which has the run's lock" in node.said, "a word")
            holder.communicate(b"\n")
        assert node.end() == 0, nodes.told()
        assert nodes.faults() == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "moment",
    ["running", "joining", "saving"],
)
def test_all_asked_to_stop_end_with_75_and_go_on_when_started_again(
    server, tmp_path, moment
):
    with Nodes(server, tmp_path, nodes=2, steps=60) as nodes:
        if moment == "saving":
            nodes.run.mkdir()
            nodes.do(0, "nap", ".save")
        started = nodes.start("n0", "n1")
        if moment == "joining":
            until(lambda: len(nodes.events("join")) == 2, "both")
        elif moment == "running":
            nodes.until_step(15)
        else:
            until(lambda: (nodes.run / "napping").exists(), "a save")
        for node in started:
            node.kill(signal.SIGTERM)
        assert [node.end() for node in started] == [75, 75], nodes.told()
        assert not nodes.living() and nodes.faults() in ([], [("preempted", [])])
        again = nodes.start("n0", "n1")
        assert [node.end() for node in again] == [0, 0], nodes.told()
        nodes.check(60)
        assert [node.end() for node in nodes.start("n0", "n1")] == [0, 0]
        assert "the run is done already" in nodes.nodes["n0"].said


@pytest.mark.thorough
def test_one_that_is_asked_to_go_leaves_the_others_go_on_and_it_is_taken_back(
    server, tmp_path
):
    with Nodes(server, tmp_path, steps=200) as nodes:
        started = nodes.start("n0", "n1", "n2", **STEADY)
        nodes.until_step(15)
        started[0].kill(signal.SIGTERM)
        assert started[0].end() == 75
        assert nodes.until_plan("running", 2)["members"] == ["n1", "n2"]
        (back,) = nodes.start("n0", **STEADY)
        assert nodes.until_plan("running", 3)["members"] == ["n0", "n1", "n2"]
        assert [node.end() for node in (back, *started[1:])] == [0, 0, 0], nodes.told()
        assert nodes.faults() == [("preempted", []), ("grow", [])]
        nodes.check(200)
        # Nobody went back behind what was saved when all stopped.
        rows = (nodes.run / "rows").read_text().splitlines()
        first = next(line for line in rows if line.endswith("generation 2"))
        assert int(first.split()[0]) >= 16


@pytest.mark.thorough
def test_a_spare_takes_the_place_of_a_lost_node(server, tmp_path):
    with Nodes(server, tmp_path, nodes=2, steps=100) as nodes:
        n0, n1 = nodes.start("n0", "n1")
        nodes.until_step(3)
        (spare,) = nodes.start("n2")
        until(
            lambda: nodes.events("join")[-1:] and len(nodes.events("join")) == 3,
            "the spare",
        )
        n1.kill()
        plan = nodes.until_plan("running", 2)
        assert (plan["members"], plan["mesh"]["data"]) == (["n0", "n2"], 2)
        assert [n0.end(), n1.end(), spare.end()] == [0, -signal.SIGKILL, 0], (
            nodes.told()
        )
        nodes.check(100)


@pytest.mark.thorough
def test_of_two_supervisors_of_one_name_one_works(server, tmp_path):
    with Nodes(server, tmp_path, nodes=1, steps=80) as nodes:
        (first,) = nodes.start("n0")
        nodes.until_step(2)
        (second,) = nodes.start("n0", output=tmp_path / "second")
        assert second.end() == 2
        assert second.said.count("\n") == 1 and "another supervisor" in second.said
        assert "give this one another --node" in second.said
        assert first.end() == 0
        nodes.check(80)


@pytest.mark.thorough
def test_one_that_was_frozen_while_another_took_its_name_goes(server, tmp_path):
    with Nodes(server, tmp_path, nodes=1, steps=100) as nodes:
        (first,) = nodes.start("n0")
        nodes.until_step(2)
        first.kill(signal.SIGSTOP)
        (second,) = nodes.start("n0", output=tmp_path / "second")
        nodes.until_plan("running", 2)
        first.kill(signal.SIGCONT)
        assert first.end() == 2 and "another supervisor" in first.said
        assert second.end() == 0, second.said
        nodes.check(100)


@pytest.mark.thorough
def test_what_fails_before_the_first_step_is_not_tried_again(server, tmp_path):
    with Nodes(server, tmp_path, nodes=2) as nodes:
        nodes.run.mkdir()
        nodes.do(1, "exit 2 config", ".start")
        started = nodes.start("n0", "n1")
        assert [node.end() for node in started] == [2, 2], nodes.told()
        assert (
            nodes.plans()[-1]["generation"] == 1
            and "as asked" in nodes.plans()[-1]["reason"]
        )
        assert not nodes.living()


@pytest.mark.parametrize(
    ("address", "shown"), [("::1", "[::1]"), ("127.0.0.1", "127.0.0.1")]
)
def test_the_coordinator_is_named_as_its_clients_take_it(
    server, tmp_path, address, shown
):
    with Nodes(server, tmp_path, nodes=1, steps=2) as nodes:
        (node,) = nodes.start("n0", address=address)
        assert node.end() == 0
        host, _, port = nodes.until_plan("running")["coordinator"].rpartition(":")
        assert host == shown and int(port) > 0


def test_too_few_nodes_end_with_75(server, tmp_path):
    with Nodes(server, tmp_path, nodes=2, least=2, join_timeout=0.5) as nodes:
        (alone,) = nodes.start("n0")
        assert alone.end() == 75
        assert re.search(r"there are 1 nodes after 0(\.5)? s, 2 are needed", alone.said)
        assert not (nodes.run / "survive" / "gen-1").exists()


@pytest.mark.thorough
def test_who_is_deaf_to_sigterm_and_has_children_is_ended_by_a_second_one(
    server, tmp_path
):
    with Nodes(server, tmp_path, nodes=1, steps=5000) as nodes:
        nodes.run.mkdir()
        nodes.do(0, "fork", ".start")
        (node,) = nodes.start("n0")
        nodes.until_step(2)
        nodes.do(0, "deaf")
        until(lambda: not (nodes.run / "do.0").exists(), "its deafness")
        node.kill(signal.SIGTERM)
        time.sleep(0.5)
        assert node.code is None and (nodes.run / "forked").exists()
        node.kill(signal.SIGTERM)
        assert node.end() == 75, nodes.told()
        until(lambda: not nodes.living(), "the end of all")


@pytest.mark.thorough
def test_a_node_that_fails_twice_stands_back_for_a_spare(server, tmp_path):
    with Nodes(server, tmp_path, nodes=2, steps=120) as nodes:
        started = nodes.start("n0", "n1")
        nodes.until_step(3)
        started += nodes.start("n2")
        for generation, step in ((1, 15), (2, 45)):
            nodes.until_step(step)
            nodes.do(1, "kill")
            nodes.until_plan("running", generation + 1)
        last = nodes.plans()[-1]
        assert (last["members"], list(last["quarantined"])) == (["n0", "n2"], ["n1"])
        assert [node.end() for node in started] == [0, 0, 0], nodes.told()
        assert nodes.faults() == [("signal", ["n1"])] * 2
        nodes.check(120)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("restarts", "reason"),
    [(20, "a loop"), (1, "restarts of survive.restarts are spent")],
)
def test_a_fault_that_comes_again_and_again_ends_the_run_with_3(
    server, tmp_path, restarts, reason
):
    with Nodes(server, tmp_path, nodes=2, least=2, restarts=restarts) as nodes:
        nodes.run.mkdir()
        nodes.do(1, "kill always")
        started = nodes.start("n0", "n1", constants={"decide.LONGEST_DELAY": 0.1})
        assert [node.end() for node in started] == [3, 3], nodes.told()
        assert (
            reason in nodes.plans()[-1]["reason"]
            and min(restarts, 2) <= len(nodes.faults()) <= restarts
        )
        assert not nodes.living() and not (nodes.run / "overlaps").exists()


@pytest.mark.thorough
def test_a_run_directory_that_is_gone_for_a_while(server, tmp_path):
    away = tmp_path / "away"
    with Nodes(server, tmp_path, nodes=2, steps=80) as nodes:
        started = nodes.start("n0", "n1")
        nodes.until_step(5)
        nodes.run.rename(away)
        # No process goes on where its supervisor can see nobody.
        until(lambda: len(nodes.living()) == 2, "the end of both ranks", nodes.told)
        assert [node.code for node in started] == [None, None]
        away.rename(nodes.run)
        assert [node.end() for node in started] == [0, 0], nodes.told()
        nodes.check(80)


@pytest.mark.thorough
@pytest.mark.parametrize("then", ["nothing", "an empty directory"])
def test_a_run_directory_that_is_removed_ends_with_75(server, tmp_path, then):
    with Nodes(server, tmp_path, nodes=2, steps=5000) as nodes:
        started = nodes.start("n0", "n1", constants={"supervisor.GIVEN_UP": 2.0})
        nodes.until_step(5)
        nodes.run.rename(tmp_path / "away")
        if then == "an empty directory":
            nodes.run.mkdir()
        assert [node.end() for node in started] == [75, 75], nodes.told()
        for node in started:
            assert (
                "the run directory cannot be used" in node.said
                and "supervisor.py" not in node.said
            )
        assert not nodes.living()


@pytest.mark.thorough
def test_a_directory_that_another_run_has_taken_meanwhile(server, tmp_path):
    with Nodes(server, tmp_path, nodes=1, steps=80) as nodes:
        (first,) = nodes.start("n0")
        nodes.until_step(5)
        nodes.run.rename(tmp_path / "away")
        (second,) = nodes.start("n0", output=tmp_path / "second")
        assert (first.end(), second.end()) == (2, 0), nodes.told()
        nodes.check(80)


@pytest.mark.thorough
def test_much_output_into_a_pipe_that_nobody_reads(server, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with Nodes(server, tmp_path, nodes=1, steps=80) as nodes:
        nodes.run.mkdir()
        nodes.do(0, "print 50000000", ".start")
        (node,) = nodes.start("n0", output=pipe)
        nodes.until_step(20)
        os.close(reader)
        until(lambda: node.code is not None, "the end")
        assert node.code == 0 and nodes.plans()[-1]["generation"] == 1
        nodes.check(80)


@pytest.mark.thorough
def test_an_output_that_is_refused(server, tmp_path):
    with Nodes(server, tmp_path, nodes=1) as nodes:
        (node,) = nodes.start("n0", output="/dev/full")
        until(lambda: node.code is not None, "the end")
        assert node.code == 0
        nodes.check()


@pytest.mark.thorough
@pytest.mark.skipif(not may_mount(), reason="a disk of its own needs a mount")
def test_a_disk_that_is_full_while_a_rank_is_killed(tmp_path):
    def scenario() -> None:
        own_mounts()
        disk = tmp_path / "disk"
        disk.mkdir()
        mount("tmpfs", disk, options="size=1m")
        server = Server(tmp_path)
        with Nodes(server, disk, nodes=2, steps=80) as nodes:
            started = nodes.start("n0", "n1", output=tmp_path / "said")
            nodes.until_step(15)
            with (
                contextlib.suppress(OSError),
                open(disk / "ballast", "wb", buffering=0) as file,
            ):
                while True:
                    file.write(b"x" * 4096)
            generation = nodes.plans()[-1]["generation"]
            os.kill(
                next(p["pid"] for p in nodes.events("started") if p["rank"] == 1),
                signal.SIGKILL,
            )
            time.sleep(3.0)
            assert [node.code for node in started] == [None, None], nodes.told()
            assert nodes.plans()[-1]["generation"] <= generation + 1
            (disk / "ballast").unlink()
            assert [node.end() for node in started] == [0, 0], nodes.told()
            nodes.check(80)
        server.end()

    assert exit_code_of(scenario) == 0


@pytest.mark.thorough
def test_supervisors_killed_frozen_and_asked_to_go_at_random_moments(
    server, tmp_path, seed=0
):
    dice = random.Random(seed)
    how = {"constants": {"decide.STEADY": 0.5, "decide.LONGEST_DELAY": 0.5}}
    with Nodes(server, tmp_path, steps=200, restarts=1000, join_timeout=30) as nodes:
        nodes.start("n0", "n1", "n2", **how)
        ends = time.monotonic() + 8
        while time.monotonic() < ends and nodes.step < 150:
            node = nodes.nodes[dice.choice(("n0", "n1", "n2"))]
            done = dice.choice(("kill", "kill", "stop", "freeze"))
            if node.code is not None:
                pass
            elif done == "freeze":
                node.kill(signal.SIGSTOP)
                time.sleep(dice.choice((0.3, 1.0, 3.0)))
                node.kill(signal.SIGCONT)
            else:
                node.kill(signal.SIGKILL if done == "kill" else signal.SIGTERM)
                time.sleep(dice.random())
            time.sleep(dice.random() * 1.5)
            for name, one in list(nodes.nodes.items()):
                if one.code is not None:
                    nodes.start(name, **how)

        def done() -> bool:
            for name, one in list(nodes.nodes.items()):
                if one.code == 75:
                    nodes.start(name, **how)
            return all(one.code is not None for one in nodes.nodes.values())

        until(done, "the end", nodes.told)
        assert {one.code for one in nodes.nodes.values()} <= {0, -signal.SIGKILL}, (
            nodes.told()
        )
        nodes.check(200)


@pytest.mark.thorough
def test_nodes_with_different_configs_are_refused_before_anything_is_trained(
    server, tmp_path
):
    with Nodes(server, tmp_path, nodes=2) as nodes:
        n0, n1 = (
            nodes.start("n0")[0],
            nodes.start("n1", set=["optimizer.learning_rate=0.02"])[0],
        )
        assert [n0.end(), n1.end()] == [2, 2], nodes.told()
        key = "learning_rate is 0.02 on n1 and 0.001 on n0"
        for node in (n0, n1):
            assert (
                "node n1 (" in node.said
                and ") does not fit node n0 (" in node.said
                and key in node.said
            )
            assert (
                node.said.count("the same config") == 1 and "Traceback" not in node.said
            )
        assert not nodes.events("started") and not nodes.living()


@pytest.mark.thorough
def test_a_node_with_another_config_that_comes_to_a_run_is_refused_alone(
    server, tmp_path
):
    with Nodes(
        server, tmp_path, nodes=2, steps=400, node_timeout=10, step_timeout=60
    ) as nodes:
        n1, n2 = nodes.start("n1", "n2")
        nodes.until_step(5)
        # Of the lowest name: it would lead.
        (n0,) = nodes.start("n0", set=["optimizer.learning_rate=0.02"], **STEADY)
        assert n0.end() == 2, nodes.told()
        assert "node n0 (" in n0.said and "the same config" in n0.said
        assert "n0" not in {plan["leader"] for plan in nodes.plans()}
        assert [n1.end(), n2.end()] == [0, 0], nodes.told()
        nodes.check(400)
