"""Private domains: pinned certificates both ways over real sockets, and what strangers get."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from node.errors import Unreachable
from node.weights.bulk import node_certificate
from node.weights.bulk.chunk_server import ServingPatience
from node.weights.bulk.pinned_tls import Doorkeeper, client_context
from protocol.errors import PeerError
from protocol.identity import Identity
from tests.node.weights.bulk.harness import OTHER, PEER, Origin, Raw, connect, origin, token
from tests.protocol.builders import key

SERVER, CLIENT, STRANGER = key("server"), key("peer"), key("other")


@pytest.fixture(scope="module")
def certificates() -> dict[Identity, tuple[str, bytes]]:
    return {node: node_certificate.make(node) for node in (SERVER, CLIENT, STRANGER)}


@pytest.fixture
def private(tmp_path: Path, certificates: dict[Identity, tuple[str, bytes]]) -> Iterator[Origin]:
    keeper = Doorkeeper(certificates[SERVER][0], {certificates[CLIENT][1]: PEER}, max_stale=2)
    with origin(tmp_path / "versions", doorkeeper=keeper, patience=ServingPatience(stranger=1.5)) as made:
        made.keeper = keeper  # type: ignore[attr-defined]
        yield made


def test_the_certificate_is_libp2ps_and_names_the_node(certificates: dict[Identity, tuple[str, bytes]]) -> None:
    for node, (_, der) in certificates.items():
        node_certificate.check(der, node.node)
    with pytest.raises(PeerError, match="another node"):
        node_certificate.check(certificates[SERVER][1], PEER)
    for rubbish in (b"", b"rubbish", certificates[SERVER][1][:-9], bytes(5000), certificates[SERVER][1] + b"\0"):
        with pytest.raises(PeerError):
            node_certificate.check(rubbish, SERVER.node)


def test_a_known_peer_is_served_encrypted(private: Origin, certificates: dict[Identity, tuple[str, bytes]]) -> None:
    context = client_context(certificates[CLIENT][0], certificates[SERVER][1])
    connection = private.connection(tls=context, token=token(hosts=()))
    buffers = private.buffers()
    arrived: list[int] = []
    connection.get(private.manifest.digest, 0, buffers, arrived.append)
    assert (b"".join(buffers), arrived) == (private.data, [0, 1, 2, 3, 4])
    assert connection.have(private.manifest.digest, 0, 0.0) == b"\xf8"
    connection.close()


def test_a_stranger_gets_nothing(private: Origin, certificates: dict[Identity, tuple[str, bytes]]) -> None:
    """Neither with a certificate of its own, nor without one, nor in plain, whatever token it shows."""
    context = client_context(certificates[STRANGER][0], certificates[SERVER][1])
    connection = private.connection(tls=context, token=token(hosts=()))
    with pytest.raises(Unreachable):
        connection.get(private.manifest.digest, 0, private.buffers(), lambda index: None)

    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nameless.check_hostname = False
    nameless.load_verify_locations(cadata=certificates[SERVER][1])
    with pytest.raises(Unreachable):
        private.connection(tls=nameless, token=token(hosts=())).have(private.manifest.digest, 0, 0.0)

    with Raw(private.port) as client:
        client.send(f"GET {private.base}/0-0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token()}\r\n\r\n".encode())
        answer = client.rest()
    assert b"HTTP" not in answer
    assert private.chunk(0)[:32] not in answer
    assert private.server.sent == 0


def test_a_peers_token_is_no_use_to_another(private: Origin, certificates: dict[Identity, tuple[str, bytes]]) -> None:
    private.keeper.admit(OTHER, certificates[STRANGER][1])  # type: ignore[attr-defined]
    context = client_context(certificates[STRANGER][0], certificates[SERVER][1])
    with pytest.raises(Unreachable, match="token"):
        private.connection(tls=context, token=token(PEER, hosts=())).have(private.manifest.digest, 0, 0.0)
    mine = private.connection(tls=context, token=token(OTHER, hosts=()))
    assert mine.have(private.manifest.digest, 0, 0.0) == b"\xf8"
    mine.close()


def test_a_peer_that_changed_its_certificate_is_known_by_the_new_one(
    private: Origin, certificates: dict[Identity, tuple[str, bytes]]
) -> None:
    pem, der = node_certificate.make(CLIENT)
    private.keeper.admit(PEER, der)  # type: ignore[attr-defined]
    old = client_context(certificates[CLIENT][0], certificates[SERVER][1])
    with pytest.raises(Unreachable):
        private.connection(tls=old, token=token(hosts=())).have(private.manifest.digest, 0, 0.0)
    new = private.connection(tls=client_context(pem, certificates[SERVER][1]), token=token(hosts=()))
    assert new.have(private.manifest.digest, 0, 0.0) == b"\xf8"
    new.close()


def test_a_certificate_that_openssl_takes_for_none_keeps_nobody_else_out(
    certificates: dict[Identity, tuple[str, bytes]],
) -> None:
    keeper = Doorkeeper(certificates[SERVER][0], {b"rubbish": OTHER})  # as a child that was started anew
    keeper.admit(PEER, certificates[CLIENT][1])
    assert keeper.context.cert_store_stats()["x509"] == 1
    keeper.admit(PEER, b"other rubbish")
    keeper.admit(OTHER, certificates[STRANGER][1])
    assert keeper.context.cert_store_stats()["x509"] == 2


def test_one_that_changes_its_certificate_again_and_again_fills_nothing(
    private: Origin, certificates: dict[Identity, tuple[str, bytes]]
) -> None:
    keeper: Doorkeeper = private.keeper  # type: ignore[attr-defined]
    first = keeper.context
    made = [node_certificate.make(CLIENT) for _ in range(4)]
    for count, (_, der) in enumerate(made, 1):
        keeper.admit(PEER, der)
        keeper.admit(PEER, der)
        assert (keeper.context is first) == (count <= 2)
        assert keeper.context.cert_store_stats()["x509"] <= 3
    for pem, answers in ((certificates[CLIENT][0], False), (made[0][0], False), (made[-1][0], True)):
        connection = private.connection(tls=client_context(pem, certificates[SERVER][1]), token=token(hosts=()))
        with nullcontext() if answers else pytest.raises(Unreachable):
            assert connection.have(private.manifest.digest, 0, 0.0) == b"\xf8"
        connection.close()


def test_the_context_to_a_peer_is_made_once(certificates: dict[Identity, tuple[str, bytes]]) -> None:
    own, peer = certificates[CLIENT][0], certificates[SERVER][1]
    assert client_context(own, peer) is client_context(own, peer)
    assert client_context(own, certificates[STRANGER][1]) is not client_context(own, peer)


def test_an_impostor_at_the_address_is_found_out(
    private: Origin, certificates: dict[Identity, tuple[str, bytes]]
) -> None:
    context = client_context(certificates[CLIENT][0], certificates[STRANGER][1])
    with pytest.raises(Unreachable, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
        connect(private.port, tls=context, token=token(hosts=())).have(private.manifest.digest, 0, 0.0)


def test_a_stranger_that_stays_silent_is_shown_out(private: Origin) -> None:
    with Raw(private.port) as client:
        assert client.rest() == b""
