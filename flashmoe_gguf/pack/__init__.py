"""Packed model files: every expert's parts in one aligned block, checksummed, and back again.

`pack_model` writes one, `unpack_model` restores the byte-identical original files, and
`verify_model` checks every block and dense tensor. The packed file, format version 1, is a valid
GGUF v3 with `general.alignment` 4096, so that one aligned read brings a whole expert:

| metadata, in this order          | type  | what                                               |
|----------------------------------|-------|----------------------------------------------------|
| the first source file's keys     | any   | raw bytes, in order; without `split.*`; alignment  |
|                                  |       | 4096 in place of theirs, or after them             |
| `flashmoe.version`               | u32   | 1                                                  |
| `flashmoe.source.files`          | [str] | names of the source files, without folders         |
| `flashmoe.source.sizes`          | [u64] | their sizes in bytes                               |
| `flashmoe.source.fingerprint`    | str   | hex XXH3-128 over, per file: its size (u64 LE),    |
|                                  |       | then its header, bytes [0, start of data)          |
| `flashmoe.parts.tensor`          | [str] | one entry per part, here and below: its tensor     |
| `flashmoe.parts.layer`           | [u32] | grouped by (layer, family), inside a group in the  |
| `flashmoe.parts.family`          | [str] | order of use: up, gate_up, gate, down. Family is   |
|                                  |       | "exps" or "chexps"                                 |
| `flashmoe.parts.type`            | [u32] | ggml type                                          |
| `flashmoe.parts.ne0 .ne1`        | [u64] | row length, rows                                   |
| `flashmoe.parts.n_expert`        | [u64] |                                                    |
| `flashmoe.parts.block_offset`    | [u64] | of the part in its expert's block                  |
| `flashmoe.parts.expert_bytes`    | [u64] | of the part of one expert                          |
| `flashmoe.parts.shard`           | [u32] | index of the source file                           |
| `flashmoe.parts.source_offset`   | [u64] | of the tensor from the start of that file          |

| tensors, in this order            | type, shape                 | what                           |
|-----------------------------------|-----------------------------|--------------------------------|
| the dense tensors                 | as in the source            | data unchanged                 |
| `flashmoe.blk.{layer}.{family}`   | I8 [block_bytes, n_expert]  | one block per expert: its      |
|                                   |                             | parts at multiples of 4096,    |
|                                   |                             | zeros between and after them   |
| `flashmoe.sums`                   | I64 [parts x their experts] | XXH3-64 (seed 0, the unsigned  |
|                                   |                             | number's bits) of each part of |
|                                   |                             | each expert, without padding   |
| `flashmoe.dense_sums`             | I64 [dense tensors]         | XXH3-64 of each dense tensor   |
| `flashmoe.header.{i}`             | I8 [bytes]                  | source file i, [0, start of    |
|                                   |                             | data)                          |
| `flashmoe.gaps.{i}`               | I8 [bytes]                  | only where file i has non-zero |
|                                   |                             | bytes outside header and       |
|                                   |                             | tensors: records of u64 offset |
|                                   |                             | in the file, u64 n, n bytes    |

Everything in the packed header follows from the source's headers and the places of its gaps, so
a reader derives it again from `flashmoe.header.{i}` and takes no other (see `open_packed`).

With stripes the packed file is the same but for its blocks, and has one key more, after the
fingerprint: `flashmoe.stripes` [str], the n paths where its stripes were written, n from 1 to 16.
Stripe i, from 0, is called NAME.stripe-{i + 1}-of-{n}.gguf, NAME being that of the packed file;
it is looked for at its path, then beside the packed file, and is a GGUF v3 with:

| metadata, in this order          | type  | what                                               |
|----------------------------------|-------|----------------------------------------------------|
| `general.alignment`              | u32   | 4096                                               |
| `flashmoe.version`               | u32   | 1                                                  |
| `flashmoe.stripe.index`          | u32   | i                                                  |
| `flashmoe.stripe.count`          | u32   | n                                                  |
| `flashmoe.source.fingerprint`    | str   | that of the packed file                            |

| tensors                           | type, shape                 | what                           |
|-----------------------------------|-----------------------------|--------------------------------|
| `flashmoe.blk.{layer}.{family}`   | I8 [block_bytes, m]         | the blocks of the experts e    |
|                                   |                             | with e % n = i, in order; none |
|                                   |                             | where there is no such expert  |

A source file that ends before its data would start (a first shard without tensors) has a
header of all its bytes.
"""

from flashmoe_gguf.pack.opening import PackedFile, open_packed
from flashmoe_gguf.pack.packing import PackReport, pack_model
from flashmoe_gguf.pack.unpacking import UnpackReport, unpack_model
from flashmoe_gguf.pack.verifying import Damage, VerifyReport, verify_model

__all__ = [
    "Damage",
    "PackReport",
    "PackedFile",
    "UnpackReport",
    "VerifyReport",
    "open_packed",
    "pack_model",
    "unpack_model",
    "verify_model",
]
