#!/usr/bin/env bash
# Writes rendered/ anew: every overlay as one file, for review, and for who has no kustomize. Needs kustomize 4.5 or newer.
set -euo pipefail
cd "$(dirname "$0")"
command -v "${KUSTOMIZE:=kustomize}" > /dev/null || { echo "render: $KUSTOMIZE not found: https://kustomize.io, or KUSTOMIZE=/path/to/it" >&2; exit 1; }
out=${1:-rendered}
mkdir -p "$out"
for overlay in overlays/*/; do
  name=$(basename "$overlay")
  { echo "# kubectl apply -f this, or kubectl apply -k k8s/overlays/$name: the same. Made by k8s/render.sh."; "$KUSTOMIZE" build "$overlay"; } > "$out/$name.yaml"
done
