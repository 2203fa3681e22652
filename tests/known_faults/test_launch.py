"""Faults of launch and of ranks that stop, on the rules themselves.

Real runs: tests/launch/test_faults.py, tests/launch/test_bad_input.py, tests/slurm. Not covered:
several machines, where the head node's address comes from Slurm.
"""

from __future__ import annotations

import socket

import pytest

from megarl.launcher import PortError, rendezvous


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_f53_without_an_explicit_port_a_free_one_is_taken() -> None:
    assert rendezvous() == ["--standalone"]


def test_f53_an_explicit_address_and_port_are_respected(monkeypatch) -> None:
    port = _free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    assert rendezvous() == ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert rendezvous() == ["--master_addr", "localhost", "--master_port", str(port)]


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "0.0.0.0"])
def test_f53_a_busy_port_is_an_error_at_once(monkeypatch, listens_on: str) -> None:
    with socket.create_server((listens_on, 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(PortError, match=f"MASTER_PORT={port} cannot be listened on here"):
            rendezvous()


@pytest.mark.parametrize("port", ["0", "70000", "auto", ""])
def test_f53_what_is_no_port_is_an_error(monkeypatch, port: str) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(PortError, match="is no port"):
        rendezvous()


def test_f53_another_machines_address_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(_free_port()))
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # reserved for documentation
    with pytest.raises(PortError, match="MASTER_ADDR=192.0.2.1"):
        rendezvous()
