#!/usr/bin/env bash
# Makes what `--sandbox oci` and `--sandbox microvm` run programs in: a small Debian with Python.
#   bash scripts/make_sandbox_image.sh podman|docker          the image nanorl-sandbox, imported here
#   bash scripts/make_sandbox_image.sh microvm FOLDER         a kernel and a disk in memory, in FOLDER
# Needs Debian's mmdebstrap and root; for microvm also busybox-static, cpio and a package mirror with
# the kernel. Downloads about 40 MB from the mirror that this machine's apt uses.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
kind="${1:-}"
folder="${2:-}"
case "$kind" in
podman | docker) wanted=(mmdebstrap "$kind") ;;
microvm) wanted=(mmdebstrap busybox cpio dpkg-deb) && [ -n "$folder" ] ||
    { echo "usage: $0 microvm FOLDER" >&2; exit 2; } ;;
*) echo "usage: $0 podman | docker | microvm FOLDER" >&2 && exit 2 ;;
esac
for name in "${wanted[@]}"; do
    command -v "$name" >/dev/null || {
        echo "$0: $name is missing (Debian: apt-get install mmdebstrap podman busybox-static cpio)" >&2
        exit 1
    }
done
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
skip=()
for path in doc man locale info lintian bug zoneinfo; do # debconf needs perl5
    skip+=("--dpkgopt=path-exclude=/usr/share/$path/*")
done
mmdebstrap --quiet --variant=minbase --include=python3-minimal,libpython3-stdlib "${skip[@]}" \
    bookworm "$work/rootfs.tar"
if [ "$kind" != microvm ]; then
    "$kind" import "$work/rootfs.tar" nanorl-sandbox
    exit
fi

mkdir -p "$folder" "$work/root" "$work/kernel"
folder="$(cd "$folder" && pwd)"
tar -C "$work/root" -xf "$work/rootfs.tar"
cd "$work/root"
rm -rf boot home media mnt opt root srv var lib/systemd usr/share usr/sbin/* usr/lib/apt usr/lib/dpkg \
    usr/lib/x86_64-linux-gnu/{perl-base,gconv,libapt*,libdb-5*} usr/bin/{perl*,apt*,dpkg*}
mkdir -p var work app workspace testbed repo tests logs
ln -s /tmp var/tmp
cp "$(command -v busybox)" usr/bin/busybox

package="$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends:/ {print $2; exit}')"
(cd "$work/kernel" && apt-get download -qq "$package" 2>/dev/null && dpkg-deb -x ./*.deb .)
cp "$work"/kernel/boot/vmlinuz-* "$folder/kernel"
mkdir -p lib/modules
for name in virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_console; do
    find "$work/kernel/lib/modules" -name "$name.ko" -exec cp {} lib/modules/ \;
done
cat >init <<'INIT'
#!/usr/bin/busybox sh
# The first process of the machine: mounts, drivers, then Python, which takes its program from the
# port that the host reads and writes.
b=/usr/bin/busybox
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev
$b mkdir -p /dev/shm
for name in virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_console; do
    $b insmod /lib/modules/$name.ko
done
for word in $($b cat /proc/cmdline); do
    case "$word" in sandbox.*) eval "${word#sandbox.}" ;; esac
done
for path in /tmp /work /app /workspace /testbed /repo /tests /logs; do
    $b mount -t tmpfs -o "size=$bytes,nr_inodes=$inodes,mode=1777,nosuid,nodev" tmpfs $path
done
$b mount -t tmpfs -o size=16m,nr_inodes=1024,mode=1777 tmpfs /dev/shm
$b hostname sandbox
$b rm -f /lib/modules/*
$b mount -o remount,ro / 2>/dev/null
$b ip link set lo up 2>/dev/null
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -e /dev/vport0p1 ] || $b sleep 0.2; done
exec $b env -i PATH=/usr/bin:/bin HOME=/tmp LANG=C.UTF-8 PYTHONHASHSEED=0 OMP_NUM_THREADS=1 \
    PYTHONDONTWRITEBYTECODE=1 /usr/bin/python3 -s -S -B -u /boot.py 0<>/dev/vport0p1 1>&0 2>/dev/console
INIT
chmod 755 init
python3 - "$root" >boot.py <<'PYTHON'
import sys
sys.path.insert(0, sys.argv[1])
from nanorl.sandbox.backends.box import PYTHON_FLAGS
print(PYTHON_FLAGS[-1])
PYTHON
find . | cpio --quiet -o -H newc | gzip -1 >"$folder/initrd"
ls -l "$folder"
