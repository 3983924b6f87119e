"""The same traces read by HolisticTraceAnalysis (pip install HolisticTraceAnalysis, best in an environment of its own).

python tests/gpu/compare_hta.py TRACE.json.gz...      exit 1 when a share differs by more than 0.1 percentage points

Traces whose communication is not NCCL's are compute to HTA: see docs/evidence.md.
"""

from __future__ import annotations

import os
import sys

os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"  # else starts are rounded up and ends down to whole microseconds

from hta.trace_analysis import TraceAnalysis

from lightning_ep.profiling.readers import read_trace
from lightning_ep.profiling.report import overlap_report


def main(paths: list[str]) -> int:
    worst = 0.0
    for path in paths:
        # By default HTA leaves the last step out.
        analysis = TraceAnalysis(trace_files={0: os.path.abspath(path)}, include_last_profiler_step=True)
        theirs = float(analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0])
        report = overlap_report(read_trace(path)[0])
        ours = 100 * (report.hidden_fraction or 0.0)
        worst = max(worst, abs(ours - theirs))
        print(f"{path}: {ours:.2f}% here, {theirs:.2f}% in HTA")
    return int(worst > 0.1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
