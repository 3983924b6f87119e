#!/usr/bin/env bash
# The GPU checks, on a machine with one GPU:  bash tests/gpu/run.sh KIT_DIR [NAME...]      (kit.sh makes KIT_DIR)
#
# Each check has a time limit of its own and a log in $OUT (or /tmp). A table at the end; fails if one of them failed.
# Without names all run, but those whose part of the kit is not there.
here=$(cd "$(dirname "$0")" && pwd)
kit=${1:?usage: run.sh KIT_DIR [NAME...]}; shift
logs=${OUT:-/tmp}
cd "$here/../.."
. "$here/one_gpu.sh" "$kit"
unset OMP_NUM_THREADS

#        name          part       seconds  ranks  script and arguments
checks=("equality2     comm       240      2      check_equality.py"
        "equality4     comm       240      4      check_equality.py"
        "checkpoint    comm       180      2      check_checkpoint.py"
        "alltoall      comm       180      2      check_dispatchers.py alltoall"
        "deepep        deepep     180      2      check_dispatchers.py deepep"
        "hybridep      hybridep   240      2      check_dispatchers.py hybridep"
        "training      deepep     240      2      train_dispatchers.py alltoall deepep"
        "wgrad         te         400      2      check_wgrad.py"
        "evidence      comm       300      2      check_evidence.py"
        "faults        comm       400      1      check_faults.py"
        "graphs        py         400      1      check_graphs.py")

launch() { # launch RANKS SCRIPT...: one process runs without MPS, and may start others
  if [ "$1" -gt 1 ]; then on_one_gpu "$@"; return; fi
  shift
  sharing_gpu env -u CUDA_MPS_PIPE_DIRECTORY python3 "$@"
}
export -f launch on_one_gpu sharing_gpu with_hybridep

rows=() failed=0
for check in "${checks[@]}"; do
  read -r name part seconds ranks script <<< "$check"
  if [ $# -gt 0 ]; then [[ " $* " == *" $name "* ]] || continue
  elif [ ! -d "$kit/$part" ]; then rows+=("$name: not run, $kit/$part is not there"); continue; fi
  began=$SECONDS
  echo "=== $name"
  with=; [ "$part" != hybridep ] || with=with_hybridep
  timeout -s KILL "$seconds" bash -c '"$@"' _ $with launch "$ranks" tests/gpu/$script > "$logs/$name.log" 2>&1
  status=$?
  tail -n 25 "$logs/$name.log"
  [ $status -eq 0 ] || failed=1
  rows+=("$name: $([ $status -eq 0 ] && echo passed || echo "FAILED ($status)"), $((SECONDS - began)) s")
done
printf '\n%s\n' "--- results"; printf '%s\n' "${rows[@]}"
exit $failed
