"""Token buckets, and who a request is from behind proxies."""

from __future__ import annotations

from flowfabric.server.options import Rate
from flowfabric.server.proxies import TrustedProxies
from flowfabric.server.rates import Buckets, address_group, retry_after


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    clock = Clock()
    buckets = Buckets(Rate(2, 3), clock=clock)
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 0]
    assert buckets.take("a") == 0.5
    assert buckets.take("b") == 0  # another's
    clock.now = 0.5
    assert buckets.take("a") == 0
    assert buckets.take("a") > 0
    clock.now = 1000
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 0.5]  # never more than the burst


def test_refused_requests_cost_nothing_so_that_a_client_that_keeps_trying_gets_the_rate() -> None:
    clock = Clock()
    buckets = Buckets(Rate(1, 1), clock=clock)
    taken = 0
    for step in range(1001):
        clock.now = step / 100
        taken += buckets.take("a") == 0
    assert 10 <= taken <= 11


def test_without_a_rate_everything_passes_and_nothing_is_kept() -> None:
    buckets = Buckets(None)
    assert all(buckets.take(str(n)) == 0 for n in range(100))
    assert len(buckets) == 0


def test_the_number_of_buckets_is_bounded_and_the_longest_unused_goes_first() -> None:
    buckets = Buckets(Rate(1, 1), most=3, clock=Clock())
    for name in ("a", "b", "c", "a", "d"):
        buckets.take(name)
    assert len(buckets) == 3
    assert buckets.take("a") > 0  # still known
    assert buckets.take("b") == 0  # forgotten


def test_retry_after_is_whole_seconds_and_at_least_one() -> None:
    assert [retry_after(seconds) for seconds in (0.001, 1, 1.2, 60)] == ["1", "1", "2", "60"]


def test_addresses_of_one_network_of_ipv6_share_a_bucket() -> None:
    assert address_group("2001:db8::1") == address_group("2001:db8::ffff:2") != address_group("2001:db8:0:1::1")
    assert address_group("::ffff:10.0.0.1") == address_group("10.0.0.1") == "10.0.0.1"
    assert address_group("") == ""


PROXIES = TrustedProxies(["10.0.0.0/8", "::1"])
# peer, forwarded, proto -> address, scheme
FORWARDED: list[tuple[str, list[str], list[str], str, str]] = [
    ("192.0.2.1", ["198.51.100.9"], ["https"], "192.0.2.1", "http"),  # not one of ours: ignored
    ("10.0.0.1", [], [], "10.0.0.1", "http"),
    ("10.0.0.1", ["198.51.100.9"], ["https"], "198.51.100.9", "https"),
    ("10.0.0.1", ["1.1.1.1, 198.51.100.9"], [], "198.51.100.9", "http"),  # the first was invented by the client
    ("10.0.0.1", ["1.1.1.1", "198.51.100.9, 10.0.0.2"], [], "198.51.100.9", "http"),  # several headers, two proxies
    ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], [], "10.0.0.3", "http"),
    ("10.0.0.1", ["198.51.100.9, garbage"], [], "10.0.0.1", "http"),
    ("10.0.0.1", ["198.51.100.9:4711"], ["ftp"], "198.51.100.9", "http"),
    ("::1", ["[2001:db8::7]:443"], ["HTTPS"], "2001:db8::7", "https"),
    ("::ffff:10.0.0.1", ["198.51.100.9"], [], "198.51.100.9", "http"),
    ("10.0.0.1", ["198.51.100.9"], ["https, http"], "198.51.100.9", "http"),
]


def test_only_trusted_proxies_say_who_calls() -> None:
    for peer, forwarded, protos, address, scheme in FORWARDED:
        headers = [(b"x-forwarded-for", one.encode()) for one in forwarded]
        headers += [(b"x-forwarded-proto", one.encode()) for one in protos]
        assert PROXIES.resolve(peer, "http", headers) == (address, scheme), (peer, forwarded)
        assert TrustedProxies().resolve(peer, "http", headers) == (peer, "http")
