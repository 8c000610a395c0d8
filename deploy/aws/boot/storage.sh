#!/bin/bash
# Each boot: /srv/models on the EBS volume, or on the instance's own drives as RAID-0, whose
# contents are gone after a stop. A file system that is there is never made again.
set -euo pipefail
source /etc/flashmoe/deploy.env
label=flashmoe-models
mount=/srv/models

mkdir -p "$mount"
mountpoint -q "$mount" && exit 0

if [[ -n $VOLUME_ID ]]; then
    device=/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_${VOLUME_ID/-/}
    for _ in {1..60}; do # it is attached after the instance has started
        [[ -e $device ]] && break
        sleep 5
    done
    [[ -e $device ]] || { echo "the volume $VOLUME_ID is not attached" >&2; exit 1; }
    if [[ -z $(blkid -o value -s TYPE "$device") ]]; then
        mkfs.ext4 -q -L "$label" "$device"
    fi
else
    mdadm --assemble --scan || true # after a restart the drives are as they were
    udevadm settle
    device=$(blkid -L "$label" || true)
    if [[ -z $device ]]; then
        declare -A drives=() # some have two names for one drive
        for name in /dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_*; do
            [[ -e $name && $name != *-part* ]] && drives[$(readlink -f "$name")]=1
        done
        ((${#drives[@]})) || { echo "this instance has no drives of its own" >&2; exit 1; }
        device=/dev/md/flashmoe
        mdadm --create "$device" --run --force --name=flashmoe \
            --level=0 --chunk=512 --raid-devices="${#drives[@]}" "${!drives[@]}"
        udevadm settle
        mkfs.ext4 -q -E nodiscard -L "$label" "$device"
    fi
fi
mount -o noatime "$device" "$mount"
