"""The metrics table and the server that exports it."""

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.errors import StartupError
from shared.metrics import METRICS, Metrics, start_metrics_server, token_buckets


def test_each_name_is_in_the_table_once_and_owned_by_one_service():
    names = [spec.name for spec in METRICS]
    assert len(names) == len(set(names))
    for spec in METRICS:
        assert spec.help.endswith(".")
        assert (spec.kind == "histogram") == bool(spec.buckets)
        assert list(spec.buckets) == sorted(set(spec.buckets))


def test_names_and_labels_that_dashboards_rely_on():
    by_name = {spec.name: spec for spec in METRICS}
    owners = {
        "vllm:num_requests_running": "engine",
        "vllm:num_requests_waiting": "engine",
        "vllm:kv_cache_usage_perc": "engine",
        "vllm:num_preemptions": "engine",
        "vllm:prefix_cache_queries": "engine",
        "vllm:prefix_cache_hits": "engine",
        "vllm:iteration_tokens_total": "engine",
        "vllm:cache_config_info": "engine",
        "vllm:time_to_first_token_seconds": "frontend",
        "vllm:inter_token_latency_seconds": "frontend",
        "vllm:e2e_request_latency_seconds": "frontend",
        "vllm:request_queue_time_seconds": "frontend",
        "vllm:request_success": "frontend",
        "vllm:prompt_tokens": "frontend",
        "vllm:generation_tokens": "frontend",
    }
    for name, owner in owners.items():
        assert by_name[name].owner == owner
        if name != "vllm:cache_config_info":
            assert by_name[name].labels[:2] == ("model_name", "engine")
    assert by_name["vllm:request_success"].labels[2] == "finished_reason"


def test_token_buckets_end_at_the_longest_request():
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(8_192)[-3:] == (1_000, 2_000, 5_000)


def test_a_metric_is_found_by_name_and_kind():
    metrics = Metrics("engine")
    metrics.gauge("vllm:num_requests_running").labels("m", "0").set(3)
    with pytest.raises(TypeError):
        metrics.counter("vllm:num_requests_running")
    with pytest.raises(KeyError):
        metrics.histogram("vllm:time_to_first_token_seconds")


def test_what_is_served_has_the_names_of_the_contract():
    metrics = Metrics("frontend", max_model_len=2_000)
    metrics.counter("vllm:request_success").labels("m", "0", "stop").inc()
    metrics.histogram("vllm:request_prompt_tokens").labels("m", "0").observe(7)
    server = start_metrics_server("127.0.0.1", 0, metrics.registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as response:
            text = response.read().decode()
        with pytest.raises(StartupError, match=f"port {server.port} on 127.0.0.1 is in use"):
            start_metrics_server("127.0.0.1", server.port, metrics.registry)
    finally:
        server.close()
    samples = {
        (sample.name, sample.labels.get("le")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    success = samples["vllm:request_success_total", None]
    assert success.value == 1
    assert success.labels == {"model_name": "m", "engine": "0", "finished_reason": "stop"}
    assert samples["vllm:request_prompt_tokens_bucket", "5.0"].value == 0
    assert samples["vllm:request_prompt_tokens_bucket", "10.0"].value == 1
    assert ("vllm:request_prompt_tokens_bucket", "2000.0") in samples
    assert not any(name.startswith("vllm:num_requests_running") for name, _ in samples)
