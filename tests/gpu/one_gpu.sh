# Source this on a GPU machine to run several ranks on one GPU:  . tests/gpu/one_gpu.sh KIT_DIR
#
# KIT_DIR (kit.sh makes it) holds what the machine lacks: */*.whl are put on PYTHONPATH, comm/libnccl.so.2.gz is an
# NCCL (>= 2.30) that lets ranks share a GPU. `on_one_gpu N CMD...` runs CMD as N ranks under MPS, with few channels, so
# that the ranks' kernels fit beside each other.
kit=${1:?usage: . one_gpu.sh KIT_DIR}
mkdir -p /tmp/kit/site /tmp/kit/nccl /tmp/mps /tmp/mps-log
[ -f "$kit/comm/libnccl.so.2.gz" ] && gunzip -c "$kit/comm/libnccl.so.2.gz" > /tmp/kit/nccl/libnccl.so.2
for wheel in "$kit"/*/*.whl; do
  # Both are the module deep_ep; `with_hybridep CMD...` chooses.
  case $wheel in */hybridep/*) site=/tmp/kit/hybridep ;; *) site=/tmp/kit/site ;; esac
  python3 -m zipfile -e "$wheel" "$site"
done
with_hybridep() { PYTHONPATH=/tmp/kit/hybridep:$PYTHONPATH "$@"; }
nvshmem=$(python3 -c 'import site; print(site.getsitepackages()[0])')/nvidia/nvshmem/lib
export LD_LIBRARY_PATH="$nvshmem:${LD_LIBRARY_PATH:-}" PYTHONPATH="/tmp/kit/site:$PWD:${PYTHONPATH:-}"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
"$(command -v nvidia-cuda-mps-control || echo /usr/local/nvidia/bin/nvidia-cuda-mps-control)" -d && sleep 1
sharing_gpu() { # sharing_gpu CMD...: in the environment of ranks that share the GPU
  LIGHTNING_EP_ONE_GPU=1 LD_PRELOAD=/tmp/kit/nccl/libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4 \
    NCCL_MAX_NCHANNELS=4 "$@"
}
on_one_gpu() {
  local n=$1; shift
  sharing_gpu torchrun --nproc-per-node "$n" "$@"
}
