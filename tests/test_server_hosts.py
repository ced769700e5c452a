# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Access to the server: host names, origins of pages, and addresses from proxies."""

import logging

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
from fake_engine import FakeEngine
from serving import serving
from specops.server import Access, default_hosts

HTTP = httpx.Client(timeout=120)
BODY = {"prompt": "abc", "max_tokens": 1}


def test_only_local_host_names_are_accepted_without_keys() -> None:
    """This stops DNS rebinding: a page whose own name leads to this machine gets no answer."""
    assert default_hosts("0.0.0.0", has_keys=False) is None
    assert default_hosts("127.0.0.1", has_keys=True) is None
    hosts = default_hosts("127.0.0.3", has_keys=False)
    with serving(FakeEngine(), access=Access(allowed_hosts=hosts)) as served:
        for host in ("localhost", "LOCALHOST:80", "a.localhost:1", "127.0.0.1:8000", "[::1]:8000"):
            answer = HTTP.get(f"{served.url}/v1/models", headers={"Host": host})
            assert answer.status_code == 200, host
        assert HTTP.get(f"{served.url}/health", headers={"Host": "127.0.0.3"}).status_code == 200
        for host in ("evil.com", "evil.com:8000", "localhost.evil.com", "10.0.0.1", "[", "", "::2"):
            for method, path in (("GET", "/"), ("POST", "/v1/completions"), ("GET", "/health")):
                headers = {"Host": host}
                answer = HTTP.request(method, served.url + path, json=BODY, headers=headers)
                assert answer.status_code == 400, (host, path)
                assert answer.json()["error"]["code"] == "unknown_host"
                assert "--allowed-hosts" in answer.json()["error"]["message"]
    with serving(FakeEngine(), access=Access(allowed_hosts=["*.Example.com", "api"])) as served:
        for host, status in (("a.example.com", 200), ("API:1", 200), ("example.com", 400)):
            answer = HTTP.get(f"{served.url}/health", headers={"Host": host})
            assert answer.status_code == status, host


def test_pages_of_other_origins_are_answered_if_allowed() -> None:
    page = {"Origin": "https://page.example"}
    asks = page | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    stream = BODY | {"stream": True}
    for allowed, expected in (
        ([], None),
        (["https://other.example"], None),
        (["https://page.example", "https://b.example"], "https://page.example"),
        (["*"], "*"),
    ):
        with serving(
            FakeEngine(), api_keys=["key"], access=Access(allowed_origins=allowed)
        ) as served:
            url = f"{served.url}/v1/completions"
            before = HTTP.options(url, headers=asks)  # sent without the key
            assert (before.status_code == 200) == (expected is not None)
            for body in (BODY, stream):
                answer = HTTP.post(url, json=body, headers=page | {"Authorization": "Bearer key"})
                assert answer.status_code == 200
                assert answer.headers.get("access-control-allow-origin") == expected
            refused = HTTP.post(url, json=BODY, headers=page)
            assert refused.status_code == 401
            assert refused.headers.get("access-control-allow-origin") == expected


def test_only_trusted_proxies_may_report_client_addresses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    claims = ("203.0.113.7", 'a b" INFO:0', "2001:db8::1")
    for trusted, expected in (
        ([], {"from 127.0.0.1"}),
        (["10.0.0.0/8"], {"from 127.0.0.1"}),
        (["127.0.0.1"], {"from 203.0.113.7", "from 127.0.0.1", "from 2001:db8::/64"}),
        (["*"], {"from 203.0.113.7", "from 127.0.0.1", "from 2001:db8::/64"}),
    ):
        engine = FakeEngine()
        caplog.clear()
        with (
            serving(engine, access=Access(forwarded_allow_ips=trusted)) as served,
            caplog.at_level(logging.INFO, "uvicorn.access"),
        ):
            logging.getLogger("uvicorn.access").propagate = True
            for claim in claims:
                headers = {"X-Forwarded-For": claim}
                answer = HTTP.post(f"{served.url}/v1/completions", json=BODY, headers=headers)
                assert answer.status_code == 200
            assert {owners[0] for owners in engine.owners} == expected
            assert "INFO:0" not in caplog.text
