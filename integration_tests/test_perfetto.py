"""Perfetto's published schema reads an export completely, and its `trace_processor` queries it where it can be had."""

import json
import subprocess

import jax
import jax.numpy as jnp
import pytest

import stack_profile
from stack_profile.exports import EXPORTS, write
from stack_profile.traces.trace import load_trace

pytestmark = pytest.mark.slow  # installs Perfetto's package

PERFETTO = "perfetto>=0.59,<0.60"
# Runs in Perfetto's environment. Fields that the schema does not have are kept as unknown.
READ = """
import collections, json, sys
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

def unknown(message):
    inner = [each for field, value in message.ListFields() if field.message_type is not None
             for each in (value if field.is_repeated else [value])]
    return len(UnknownFieldSet(message)) + sum(map(unknown, inner))

trace = Trace.FromString(open(sys.argv[1], "rb").read())
found = collections.Counter()
names, tracks, flows = {}, {}, [set(), set()]
for packet in trace.packet:
    names |= {each.iid: each.name for each in packet.interned_data.event_names}
    if packet.HasField("track_descriptor"):
        tracks[packet.track_descriptor.uuid] = packet.track_descriptor
    if packet.HasField("track_event"):
        event = packet.track_event
        assert event.track_uuid in tracks
        kind = TrackEvent.Type.Name(event.type)
        found[tracks[event.track_uuid].name + " " + kind] += 1
        if kind == "TYPE_SLICE_BEGIN":
            found["slice " + names[event.name_iid]] += 1
        flows[0] |= set(event.flow_ids)
        flows[1] |= set(event.terminating_flow_ids)
sizes = [len(each) for each in flows]
print(json.dumps({"unknown": unknown(trace), "found": found, "flows": sizes, "paired": flows[0] == flows[1]}))
"""
QUERY = """
import json, subprocess, sys, urllib.error
from perfetto.trace_processor import TraceProcessor
try:
    processor = TraceProcessor(trace=sys.argv[1])
except (urllib.error.URLError, OSError, subprocess.CalledProcessError) as error:
    print(json.dumps({"missing": str(error)}))
    sys.exit()
def rows(query):
    return [vars(row) for row in processor.query(query)]
OPERATIONS = "from slice join track on track.id = track_id where track.name = 'operations'"
print(json.dumps({
    "errors": rows("select name, value from stats where severity = 'error' and value > 0"),
    "slices": rows("select count(*) as n, min(dur) as shortest from slice")[0],
    "operations": rows("select sum(dur) as ns " + OPERATIONS)[0],
    "flows": rows("select count(*) as n from flow")[0],
    "counters": rows("select count(*) as n from counter")[0],
}))
"""


@pytest.fixture(scope="module")
def perfetto(peer_python):
    """Runs a script with an argument in Perfetto's environment, and returns the JSON that it prints."""
    python = peer_python(PERFETTO)

    def run(script, path):
        done = subprocess.run([python, "-c", script, path], check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.splitlines()[-1])  # the package prints the progress of its download before

    return run


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A capture of steps and its export."""

    @jax.jit
    def step(x):
        return jax.lax.fori_loop(0, 5, lambda _, carry: jnp.tanh(carry @ carry), x)

    folder = tmp_path_factory.mktemp("capture")
    x = step(jnp.ones((64, 64))).block_until_ready()
    with stack_profile.capture(folder) as captured:
        for number in range(4):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                x = step(x).block_until_ready()
    trace = load_trace(captured.wait())
    write(EXPORTS["perfetto"](trace), folder / "trace.pftrace")
    return trace, folder / "trace.pftrace"


def test_the_published_schema_knows_every_field(perfetto, exported):
    trace, path = exported
    read = perfetto(READ, str(path))
    (ops,) = trace.devices
    assert read["unknown"] == 0
    assert read["found"]["operations TYPE_SLICE_BEGIN"] == read["found"]["operations TYPE_SLICE_END"] == len(ops)
    assert read["found"]["slice step 1"] == 1 and read["found"]["step duration TYPE_COUNTER"] == len(
        trace.steps[ops.device]
    )
    assert read["flows"] == [4, 4] and read["paired"]


def test_trace_processor_finds_the_same_times_without_an_error(perfetto, exported):
    trace, path = exported
    answer = perfetto(QUERY, str(path))
    if "missing" in answer:
        pytest.skip(f"needs trace_processor, which Perfetto's package downloads: {answer['missing']}")
    (ops,) = trace.devices
    nanoseconds = (ops.end_ps // 1000 - ops.start_ps // 1000).sum()
    assert answer["errors"] == [] and answer["slices"]["shortest"] >= 0
    assert answer["operations"]["ns"] == nanoseconds
    assert answer["flows"]["n"] == 4 and answer["counters"]["n"] == len(trace.steps[ops.device])
