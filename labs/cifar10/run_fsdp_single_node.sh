#!/usr/bin/env bash
# Trains on all GPUs of this machine, or on two CPU ranks; arguments go to 'trireme train' (-n 4, --train.epochs=3).
set -euo pipefail
here=$(cd "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "$here/../../trireme.sh" train "$here/fsdp_resnet_cifar10.yaml" "$@"
