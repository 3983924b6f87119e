"""Both readers on small files with known answers, and on broken ones."""

import gzip
import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from lightning_ep.profiling import json_events
from lightning_ep.profiling.kernels import Category
from lightning_ep.profiling.readers import read_trace
from lightning_ep.profiling.report import overlap_report
from lightning_ep.profiling.rules import load_rules
from tests.profiling.trace_files import (
    AUTOGRAD,
    EXPECTED_MS,
    KERNELS,
    MYSTERY,
    SPANS,
    Kernel,
    Span,
    kineto_text,
    write_kineto,
    write_nsys,
)

WRITERS = {"plain.json": write_kineto, "packed.json.gz": write_kineto, "export.sqlite": write_nsys}


@pytest.fixture(params=WRITERS)
def table(request, tmp_path):
    [table] = read_trace(WRITERS[request.param](tmp_path / request.param))
    return table


def test_kernels_of_every_format(table):
    assert len(table) == len(KERNELS)
    assert (np.diff(table.start_N) >= 0).all()
    assert (table.start_N - table.start_N[0]).tolist() == [0, 8000, 10000, 20000, 24000, 30000, 38000], "to the ns"
    assert (table.end_N - table.start_N[0]).tolist() == [10000, 22000, 14000, 24000, 26000, 40000, 42000]
    assert set(table.stream_N[table.of(Category.COMMUNICATION)]) == {20}
    assert [table.of(c).sum() for c in Category] == [1, 2, 1, 1, 1, 1]


def test_ranges_follow_the_launch_not_the_time_of_the_kernel(table):
    by_range = [table.ranges[i] if i >= 0 else None for i in table.range_N]
    assert by_range == [None, "ep/dispatch/3", None, None, None, "ep/combine/3", None], "the innermost on its thread"


def test_steps_lie_on_the_gpus_time_line(table):
    assert (table.steps - table.start_N[0]).tolist() == [[0, 38000], [38000, 42000]]


def test_report_of_every_format(table):
    report = overlap_report(table)
    for name, value in EXPECTED_MS.items():
        assert getattr(report, name) == pytest.approx(value), name
    assert report.hidden_fraction == pytest.approx(10 / 24)
    assert (report.kernel_count, report.copy_count, report.step_count) == (6, 1, 2)
    assert report.unknown_names == {MYSTERY: 1}
    assert [(r.name, r.comm_ms, r.hidden_ms) for r in report.ranges] == [
        ("ep/combine", pytest.approx(0.010), pytest.approx(0.002)),
        ("ep/dispatch", pytest.approx(0.014), pytest.approx(0.008)),
    ]
    assert [(r.name, r.kernel_count, r.exposed_ms) for r in report.layers] == [("layer 3", 2, pytest.approx(0.014))]


def test_rank_comes_from_the_trace(tmp_path):
    [table] = read_trace(write_kineto(tmp_path / "a.json", rank=5))
    assert table.rank == 5 and "rank 5" in table.label
    [table] = read_trace(write_kineto(tmp_path / "b.json", rank=None))
    assert table.rank is None


def test_bare_list_of_events(tmp_path):
    events = json.loads(kineto_text())["traceEvents"]
    (tmp_path / "list.json").write_text(json.dumps(events))
    [table] = read_trace(tmp_path / "list.json")
    assert overlap_report(table).comm_ms == pytest.approx(0.024)


def test_buffer_borders_change_nothing(tmp_path, monkeypatch):
    path = write_kineto(tmp_path / "a.json", spans=[*SPANS, Span("ep/experts/é中𝄞", 0, 1)])
    [whole] = read_trace(path)
    monkeypatch.setattr(json_events, "_BUFFER", 37)
    monkeypatch.setattr(json_events, "_MARGIN", 5)
    [pieces] = read_trace(path)
    assert (whole.start_N == pieces.start_N).all() and whole.names == pieces.names and whole.ranges == pieces.ranges


def test_gpu_ranges_serve_where_launches_are_missing(tmp_path):
    events = [e for e in json.loads(kineto_text())["traceEvents"] if e["cat"] in ("kernel", "gpu_memcpy")]
    ts = events[4]["ts"]
    events.append({"ph": "X", "cat": "gpu_user_annotation", "name": "ep/dispatch/3", "tid": 20, "ts": ts, "dur": 14.0})
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    [table] = read_trace(tmp_path / "a.json")
    assert [r.name for r in overlap_report(table).ranges] == ["ep/dispatch"]
    assert (table.range_N >= 0).sum() == 1


def test_two_processes_in_one_export_are_two_tables(tmp_path):
    path = tmp_path / "both.sqlite"
    with closing(sqlite3.connect(path)) as db:
        write_nsys(path, process=11, into=db)
        # The same correlation ids, launched in other ranges: they must not mix.
        spans = [Span("ep/wgrad/9", -20, 60), Span("ep/wgrad/9", -20, 60, AUTOGRAD)]
        write_nsys(path, process=12, spans=spans, into=db)
    first, second = read_trace(path)
    assert (first.process, second.process) == (11, 12)
    assert {r.name for r in overlap_report(first).ranges} == {"ep/dispatch", "ep/combine"}
    assert [(r.name, r.kernel_count) for r in overlap_report(second).ranges] == [("ep/wgrad", 6)]


def test_names_that_emit_nvtx_decorates(tmp_path):
    spans = [Span("ep/dispatch/3, op_id = 17", -20, 60)]
    [table] = read_trace(write_nsys(tmp_path / "a.sqlite", spans=spans))
    assert table.ranges == ("ep/dispatch/3",)


def test_reduced_export(tmp_path):
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, shortName INTEGER)")
        db.execute("INSERT INTO StringIds VALUES (1, 'ncclDevKernel_SendRecv')")
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 9, 1)")
        db.commit()
    [table] = read_trace(tmp_path / "a.sqlite")
    assert table.counts_by_name() == {"ncclDevKernel_SendRecv": 1}


def test_user_rules_come_first(tmp_path):
    rules = [{"category": "communication", "name": "^my_own_"}, {"category": "compute", "stream": [20]}]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    [table] = read_trace(write_kineto(tmp_path / "a.json"), load_rules(tmp_path / "rules.json"))
    assert overlap_report(table).comm_ms == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("{}", "expected a list"),
        ("[1]", "rule 0"),
        ('[{"category": "gemm"}]', "needs name or stream"),
        ('[{"category": "network", "name": "x"}]', "category='network'"),
        ('[{"category": "gemm", "name": "("}]', "no regular expression"),
        ('[{"category": "gemm", "stream": "7"}]', "stream='7'"),
        ("[", "rules.json"),
    ],
)
def test_bad_rules(tmp_path, rules, message):
    (tmp_path / "rules.json").write_text(rules)
    with pytest.raises(ValueError, match=message):
        load_rules(tmp_path / "rules.json")


TEXT = kineto_text()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "empty", id="empty file"),
        pytest.param(TEXT[: len(TEXT) // 2].encode(), r"event \d+, byte \d+.*truncated", id="cut in an event"),
        pytest.param(TEXT[: TEXT.rindex('"traceName"')].encode(), "truncated", id="cut after the events"),
        pytest.param(gzip.compress(TEXT.encode())[:-400], "truncated", id="cut gzip"),
        pytest.param(
            TEXT.replace('"cudaLaunchKernel",', '"cudaLaunchKernel"', 1).encode(), "event 1, byte", id="comma"
        ),
        pytest.param(b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x"}]}', "event 0", id="no time"),
        pytest.param(b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1e999}]}', "event 0", id="endless time"),
        pytest.param(b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": NaN}]}', "event 0", id="NaN time"),
        pytest.param(b'{"traceEvents": [7]}', "expected an event", id="no event"),
        pytest.param(b'{"traceEvents": {}}', r"expected '\['", id="no list"),
        pytest.param(b'{"a": 1}', "no traceEvents", id="another JSON"),
        pytest.param(b'{"traceEvents": []}', "no GPU kernel", id="no events"),
        pytest.param(b"[" * 100_000, "a.json", id="deep nesting"),
        pytest.param(b"MZ\x90\x00 whatever", "instead of a JSON", id="another format"),
        pytest.param(b"SQLite format 3\0" + b"\1" * 200, "cannot be read as an Nsight", id="damaged SQLite"),
    ],
)
def test_broken_files_say_where(tmp_path, data, message):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(path)
    assert "a.json" in str(error.value)


def test_byte_position_is_that_of_the_fault(tmp_path):
    fault = TEXT.index('"my_own_zap"')
    path = tmp_path / "a.json"
    path.write_text(TEXT[:fault] + "oops" + TEXT[fault:])
    with pytest.raises(ValueError, match=f"byte {fault}:"):
        read_trace(path)


def test_truncated_sqlite(tmp_path):
    path = write_nsys(tmp_path / "a.sqlite")
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(ValueError, match=r"a\.sqlite"):
        read_trace(path)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "has no table CUPTI_ACTIVITY_KIND_KERNEL"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL", "is empty"),
        ("DROP TABLE StringIds", "StringIds"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'", "something other than integers"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = end + 1", "ends before it starts"),
    ],
)
def test_damaged_exports_say_what(tmp_path, statement, message):
    path = write_nsys(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement)
        db.commit()
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_unexported_nsys_report(tmp_path):
    (tmp_path / "a.nsys-rep").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="nsys export --type sqlite"):
        read_trace(tmp_path / "a.nsys-rep")


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_trace(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Category.COMMUNICATION),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", Category.COMMUNICATION),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, ...)", Category.COMMUNICATION),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(...)", Category.COMMUNICATION),
        (
            "void hybrid_ep::dispatch_kernel<...>(hybrid_ep::dispatch_kernel_param_t<unsigned short>)",
            Category.COMMUNICATION,
        ),
        ("nvshmemi_transfer_kernel", Category.COMMUNICATION),
        (
            "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
            Category.COMMUNICATION,
        ),
        ("void one_shot_all_reduce_kernel<float, 16>(...)", Category.COMMUNICATION),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", Category.COMMUNICATION),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", Category.GEMM),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm...", Category.GEMM),
        ("triton_tem_fused_mm_0", Category.GEMM),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", Category.ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention...)", Category.ATTENTION),
        ("triton_poi_fused_mul_silu_3", Category.COMPUTE),
        ("void cub::DeviceRadixSortOnesweepKernel<...>", Category.COMPUTE),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", Category.COMPUTE),
        ("[CUDA memcpy DtoH]", Category.MEMORY),
        ("Memset (Device)", Category.MEMORY),
        ("zap", Category.UNKNOWN),
    ],
)
def test_categories_of_real_names(tmp_path, name, category):
    [table] = read_trace(write_kineto(tmp_path / "a.json", kernels=[Kernel(name, 7, 0, 1, 1)]))
    assert Category(table.category_N[0]) is category
