"""Supervisors as an enemy meets them: processes killed, frozen and asked to stop, with stand-ins for the training."""

from tests.helpers.nodes import Nodes


def test_three_nodes_train_to_the_last_step(tmp_path):
    with Nodes(tmp_path) as nodes:
        started = nodes.start("n0", "n1", "n2")
        assert [node.end() for node in started] == [0, 0, 0]
        nodes.check()
