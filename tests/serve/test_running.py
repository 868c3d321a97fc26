"""How a server comes to its exit code, whatever its device does."""

import time

from fake_serving import fake

from meshtrain.serve.running import closed


def test_an_engine_that_works_is_closed_and_what_it_had_ends():
    with fake() as server:
        server.pace.seconds = 0.005
        answer = server.later(max_tokens=60)
        server.until(lambda status: status.busy == 1)
        assert closed(server.service.served)
        assert answer().status_code == 503 and answer().json()["error"]["code"] == "cancelled"


def test_a_device_that_stands_still_keeps_no_server_from_ending():
    with fake() as server:
        server.pace.hold()
        answer = server.later()
        server.until(lambda status: status.busy == 1)
        began = time.monotonic()
        assert not closed(server.service.served, 0.1) and time.monotonic() - began < 5
        server.pace.go()
        assert answer().status_code in (200, 503)
