#!/usr/bin/env bash
# Gathers here what the GPU checks need on a machine without network:  tests/gpu/kit.sh OUT_DIR [PART...]
#
# Each part is a folder of OUT_DIR, so that a call carries only what its checks use (64 MiB in all). By default all;
# hybridep, which no registry has, only where HYBRIDEP_WHEEL names its wheel.
#
#   comm       NCCL that lets ranks share a GPU    every check of several ranks   31 MB
#   py         jsonargparse, greenlet              whatever runs a Trainer         2 MB
#   te         Transformer Engine                  its experts                    21 MB
#   deepep     DeepEP                              flex + deepep                  11 MB
#   hf         transformers as constraints.txt     the Hugging Face peer          14 MB
#   hybridep   HybridEP                            flex + hybridep                 1 MB
#
# There:  . tests/gpu/one_gpu.sh OUT_DIR    A part that is there already is left alone; delete its folder to renew it.
# Made for Linux x86-64, Python 3.12, torch 2.11.0+cu130, compute capability 9.0, with transformers 5.17 and its needs.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:?usage: kit.sh OUT_DIR [PART...]}
parts=(comm py te deepep hf ${HYBRIDEP_WHEEL:+hybridep})
[ $# -eq 1 ] || parts=("${@:2}")
mkdir -p "$out"
out=$(cd "$out" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

fail() { echo "kit.sh: $*" >&2; exit 1; }

get() { # get DIR REQUIREMENT...: wheels for the GPU machine, without their dependencies
  local dir=$1; shift
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d "$dir" "$@"
}

pinned() { # pinned NAME: NAME==VERSION, as we test it
  grep "^$1==" "$repository/constraints.txt"
}

shared() { # everything that prepare.sh gathers, once for all parts
  local prepare=$repository/../shared/gpu/prepare.sh
  [ -d "$tmp/shared" ] && return
  [ -x "$prepare" ] || fail "$prepare is not here; it gathers comm, py, te and deepep. Run this in a checkout that has" \
    "the folder shared/ beside it, or ask for the parts hf and hybridep alone"
  "$prepare" "$tmp/shared" >&2
  mkdir "$tmp/shared/deepep"
  mv "$tmp"/shared/comm/*deepep*.whl "$tmp/shared/deepep/"
  get "$tmp/shared/py" "$(pinned greenlet)"
}

make_part() { # make_part NAME DIR: fill DIR, which is empty
  case $1 in
    comm | py | te | deepep)
      shared # not `shared && cp`: that would ignore its errors
      cp "$tmp/shared/$1"/* "$2" ;;
    hf) get "$2" "$(pinned transformers)" ;;
    hybridep)
      [ -f "${HYBRIDEP_WHEEL:-}" ] || fail "HYBRIDEP_WHEEL='${HYBRIDEP_WHEEL:-}' is no file. No registry has HybridEP:" \
        "build the branch hybrid-ep of deepseek-ai/DeepEP outside this repository (single node, for compute capability" \
        "9.0, Python 3.12 and torch 2.11.0) and set HYBRIDEP_WHEEL to its wheel, or leave this part out"
      cp "$HYBRIDEP_WHEEL" "$2" ;;
    *) fail "no part '$1'; there are: comm py te deepep hf hybridep" ;;
  esac
}

for part in "${parts[@]}"; do
  [ -d "$out/$part" ] && continue
  mkdir -p "$tmp/new/$part"
  make_part "$part" "$tmp/new/$part"
  mv "$tmp/new/$part" "$out/$part" # whole or not at all
done
du -sh --apparent-size "$out"/*
