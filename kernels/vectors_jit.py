"""Arrays and places in them -> products, attention and counters in vectors of 16, as single instructions (CPU, LLVM).

What `step_jit` is made of. numba compiles loops and leaves it to the compiler whether they run in vectors, and in which
order their sums are taken; here both are said. Every product is a sum in a fixed order, lane by lane, with multiply-adds
that round once, so its bits depend on its numbers alone: not on the rows beside it, and not on the machine.
Offsets are flat indices of contiguous arrays; nothing is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PAIR = 32
"""Outputs of two panels."""
_KEYS_OF_A_SUM = 64
_AHEAD = 8192
"""Bytes between the weights that are used and those that are asked for."""

HAS_WIDE_REGISTERS = bool(binding.get_host_cpu_features().get("avx512f"))
"""32 vectors of 16 numbers, not 16 of 8. It changes the order in which sums are worked at, never a sum."""

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_V8, _V32, _VF = ir.VectorType(_I8, 64), ir.VectorType(_I32, 16), ir.VectorType(_F32, 16)


def _at(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Pointer to an element of a contiguous array, by its flat index."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _vector(builder: Any, pointer: Any, kind: Any = _VF) -> Any:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4)


def _constants(values: Any, kind: Any = None) -> Any:
    """A vector of these numbers, int32 if no kind is given."""
    return ir.Constant(kind or ir.VectorType(_I32, len(values)), [int(value) for value in values])


def _splat(builder: Any, value: Any, kind: Any = _VF) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(_V32, [0] * 16))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VF, [_VF] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])


def _call(builder: Any, name: str, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _prefetch(builder: Any, pointer: Any, num_bytes: int) -> None:
    """Ask for lines of `_AHEAD` bytes further on: what is behind the pair is the next pair's, or nobody reads it."""
    first = builder.bitcast(pointer, _I8.as_pointer())
    hints = [_I32(0), _I32(3), _I32(1)]  # to read, soon, data
    for line in range(0, num_bytes, 64):
        _call(builder, "llvm.prefetch.p0", [builder.gep(first, [_I64(_AHEAD + line)]), *hints])


def _widened(builder: Any, kind: Any, pointer: Any) -> list[Any]:
    """16 outputs x 1, 2 or 4 inputs as they are stored -> a vector of float32 for each input."""
    if kind == types.float32:
        return [_vector(builder, pointer)]
    words = _vector(builder, pointer, _V32)
    if kind == types.uint16:
        low = builder.shl(words, ir.Constant(_V32, [16] * 16))
        high = builder.and_(words, ir.Constant(_V32, [-65536] * 16))
        return [builder.bitcast(low, _VF), builder.bitcast(high, _VF)]
    found = []
    for byte in range(4):
        up = builder.shl(words, ir.Constant(_V32, [24 - 8 * byte] * 16))
        found.append(builder.sitofp(builder.ashr(up, ir.Constant(_V32, [24] * 16)), _VF))
    return found


_INPUTS = {types.float32: 1, types.uint16: 2, types.int8: 4}
"""Inputs that lie together in a panel, for each kind of weight."""


@intrinsic
def add(typingctx, array, index, amount):
    """Atomic: array[index] += amount; what was there before."""

    def build(context, builder, signature, arguments):
        pointer = _at(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw("add", pointer, arguments[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), build


@intrinsic
def look(typingctx, array, index):
    """Atomic: array[index]."""

    def build(context, builder, signature, arguments):
        return builder.load_atomic(_at(context, builder, signature.args[0], *arguments), "seq_cst", 8)

    return types.int64(array, types.int64), build


@intrinsic
def let_others(typingctx):
    """Let another thread run."""

    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(_I32, [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic(prefer_literal=True)
def vectors(typingctx, rows, is_first, x, x_at, x_stride, w, w_at, num_in, out):
    """out[r, 0:32] = sums over k of x[x_at + r * x_stride + k] * w[k, 0:32], for a literal number of rows.

    `is_first`, a literal 1 or 0: of the blocks of rows that take these panels; it asks for the next ones.
    """
    num_rows, asks = rows.literal_value, bool(is_first.literal_value)

    def build(context, builder, signature, arguments):
        _, _, x_type, _, _, w_type, _, _, out_type = signature.args
        _, _, x, x_at, stride, w, w_at, count, out = arguments
        starts = [
            _at(context, builder, x_type, x, builder.add(x_at, builder.mul(stride, _I64(r))))
            for r in range(num_rows)
        ]
        targets = [_at(context, builder, out_type, out, _I64(PAIR * r)) for r in range(num_rows)]
        panels = _at(context, builder, w_type, w, w_at)
        for number, (some_rows, some_panels) in enumerate(_blocks(num_rows)):
            _block_of_products(
                builder,
                w_type.dtype,
                panels,
                count,
                [(starts[r], targets[r]) for r in some_rows],
                some_panels,
                asks and number == 0,
            )
        return context.get_dummy_value()

    return types.void(rows, is_first, x, types.int64, types.int64, w, types.int64, types.int64, out), build


def _blocks(num_rows: int) -> list[tuple[range, range]]:
    """Rows and panels whose sums fit into the registers together: 32 of 16 numbers, or 16 of 8."""
    if HAS_WIDE_REGISTERS or num_rows <= 2:
        return [(range(num_rows), range(2))]
    most = 6 if num_rows == 6 else 4
    return [
        (range(r, min(r + most, num_rows)), range(panel, panel + 1))
        for panel in range(2)
        for r in range(0, num_rows, most)
    ]


def _block_of_products(
    builder: Any, kind: Any, weights: Any, count: Any, rows: list[tuple[Any, Any]], panels: range, asks: bool
) -> None:
    """Inputs and outputs of rows -> their products with these panels of a pair."""
    inputs = _INPUTS[kind]
    places = [(r, panel) for r in range(len(rows)) for panel in panels]
    sums = {place: cgutils.alloca_once(builder, _VF) for place in places}
    for place in places:
        builder.store(ir.Constant(_VF, [0.0] * 16), sums[place])
    with cgutils.for_range_slice(builder, _I64(0), count, _I64(inputs), _I64) as (k, _):
        here = builder.gep(weights, [builder.mul(k, _I64(PAIR))])
        if asks:
            _prefetch(builder, here, 128)
        found = {
            panel: _widened(builder, kind, builder.gep(here, [_I64(16 * inputs * panel)])) for panel in panels
        }
        for r, (start, _) in enumerate(rows):
            for i in range(inputs):
                factor = _splat(builder, builder.load(builder.gep(start, [builder.add(k, _I64(i))])))
                for panel in panels:
                    place = sums[r, panel]
                    builder.store(_fma(builder, factor, found[panel][i], builder.load(place)), place)
    for r, panel in places:
        target = builder.gep(rows[r][1], [_I64(16 * panel)])
        builder.store(builder.load(sums[r, panel]), builder.bitcast(target, _VF.as_pointer()), align=4)


def _tile_at(builder: Any, number: int, pointer: Any, stride: Any, name: str = "tileloadd64") -> None:
    bytes_ = builder.bitcast(pointer, _I8.as_pointer())
    _call(builder, f"llvm.x86.{name}", [ir.Constant(_I8, number), bytes_, stride])


@intrinsic(prefer_literal=True)
def tiles(typingctx, is_first, x, x_at, w, w_at, num_in, out):
    """out[r, 0:64], four panels, of a block of up to 16 rows on AMX: x is three bfloat16, w one.

    `is_first`, a literal 1 or 0: of the blocks that take these panels; it asks for the next ones.
    """
    asks = bool(is_first.literal_value)

    def build(context, builder, signature, arguments):
        _, x_type, _, w_type, _, _, out_type = signature.args
        _, x, x_at, w, w_at, count, out = arguments
        block = _at(context, builder, x_type, x, x_at)
        panels = _at(context, builder, w_type, w, w_at)
        for panel in range(4):
            _call(builder, "llvm.x86.tilezero", [ir.Constant(_I8, panel)])
        with cgutils.for_range_slice(builder, _I64(0), count, _I64(32), _I64) as (k, _):
            here = builder.gep(panels, [builder.mul(k, _I64(4 * 16))])
            rows = builder.gep(block, [builder.mul(k, _I64(3 * 16))])
            if asks:
                _prefetch(builder, here, 4096)
            for piece in range(3):
                _tile_at(builder, 4 + piece, builder.gep(rows, [_I64(512 * piece)]), _I64(64))
            for panel in range(4):
                _tile_at(builder, 7, builder.gep(here, [_I64(32 * panel)]), _I64(256))
                for piece in range(3):
                    numbers = (panel, 6 - piece, 7)  # the smallest first
                    _call(builder, "llvm.x86.tdpbf16ps", [ir.Constant(_I8, n) for n in numbers])
        for panel in range(4):
            target = _at(context, builder, out_type, out, _I64(16 * panel))
            _tile_at(builder, panel, target, _I64(256), "tilestored64")
        return context.get_dummy_value()

    integer = types.int64
    return types.void(is_first, x, integer, w, integer, integer, out), build


@intrinsic
def byte_tiles(typingctx, x, x_at, w, w_at, num_in, out):
    """The same of int8 with int8: out is int32 [2, 3, 16, 16], panels and pieces of x, exact."""

    def build(context, builder, signature, arguments):
        x_type, _, w_type, _, _, out_type = signature.args
        x, x_at, w, w_at, count, out = arguments
        block = _at(context, builder, x_type, x, x_at)
        panels = _at(context, builder, w_type, w, w_at)
        for tile in range(6):
            _call(builder, "llvm.x86.tilezero", [ir.Constant(_I8, tile)])
        with cgutils.for_range_slice(builder, _I64(0), count, _I64(64), _I64) as (k, _):
            here = builder.gep(panels, [builder.mul(k, _I64(PAIR))])
            rows = builder.gep(block, [builder.mul(k, _I64(3 * 16))])
            _prefetch(builder, here, 2048)
            for panel in range(2):
                _tile_at(builder, 7, builder.gep(here, [_I64(64 * panel)]), _I64(128))
                for piece in range(3):
                    _tile_at(builder, 6, builder.gep(rows, [_I64(1024 * piece)]), _I64(64))
                    numbers = (3 * panel + piece, 6, 7)
                    _call(builder, "llvm.x86.tdpbssd", [ir.Constant(_I8, n) for n in numbers])
        for tile in range(6):
            target = _at(context, builder, out_type, out, _I64(256 * tile))
            _tile_at(builder, tile, target, _I64(64), "tilestored64")
        return context.get_dummy_value()

    integer = types.int64
    return types.void(x, integer, w, integer, integer, out), build


@intrinsic
def open_tiles(typingctx, shapes):
    """Configure this thread's tiles."""

    def build(context, builder, signature, arguments):
        pointer = _at(context, builder, signature.args[0], arguments[0], _I64(0))
        _call(builder, "llvm.x86.ldtilecfg", [builder.bitcast(pointer, _I8.as_pointer())])
        return context.get_dummy_value()

    return types.void(shapes), build


@intrinsic
def close_tiles(typingctx):
    def build(context, builder, signature, arguments):
        _call(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def scores_of(typingctx, q, q_at, keys, base, slots, at, dim, out, out_at):
    """out[out_at + i] = q . key of slots[at + i], for 16 keys. All are summed alike: lane by lane, then lanes in twos."""

    def build(context, builder, signature, arguments):
        q_type, _, k_type, _, slots_type, _, _, out_type, _ = signature.args
        q, q_at, keys, base, slots, at, dim, out, out_at = arguments
        query = _at(context, builder, q_type, q, q_at)
        zero = ir.Constant(_VF, [0.0] * 16)
        left = []
        together = 16 if HAS_WIDE_REGISTERS else 4
        for first in range(0, 16, together):
            sums = [cgutils.alloca_once(builder, _VF) for _ in range(together)]
            rows = []
            for i, place in enumerate(sums):
                builder.store(zero, place)
                slot = builder.load(
                    _at(context, builder, slots_type, slots, builder.add(at, _I64(first + i)))
                )
                rows.append(_at(context, builder, k_type, keys, builder.add(base, builder.mul(slot, dim))))
            with cgutils.for_range_slice(builder, _I64(0), dim, _I64(16), _I64) as (d, _):
                part = _vector(builder, builder.gep(query, [d]))
                for row, place in zip(rows, sums, strict=True):
                    key = _vector(builder, builder.gep(row, [d]))
                    builder.store(_fma(builder, part, key, builder.load(place)), place)
            left += [builder.load(place) for place in sums]
        step = 8
        while step:
            near = [lane if not lane & step else lane + 16 for lane in range(16)]
            far = [lane ^ step if not lane & step else (lane ^ step) + 16 for lane in range(16)]
            left = [
                builder.fadd(
                    builder.shuffle_vector(left[i], left[i + step], ir.Constant(_V32, near)),
                    builder.shuffle_vector(left[i], left[i + step], ir.Constant(_V32, far)),
                )
                for i in range(step)
            ]
            step //= 2
        target = builder.bitcast(_at(context, builder, out_type, out, out_at), _VF.as_pointer())
        builder.store(left[0], target, align=4)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(q, integer, keys, integer, slots, integer, integer, out, integer), build


def _exp(builder: Any, y: Any) -> Any:
    """exp of a vector within -87 .. 87: 2^n exp(r), n = round(y / ln 2). Coefficients: Cephes 2.2, expf.c. NaN stays NaN."""

    def number(value: float) -> Any:
        return ir.Constant(_VF, [value] * 16)

    magic = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to an integer in its last bits
    shifted = _fma(builder, y, number(1.44269504), number(magic))
    n = builder.fsub(shifted, number(magic))
    r = _fma(builder, n, number(-0.693359375), y)
    r = _fma(builder, n, number(2.12194440e-4), r)
    p = number(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(builder, p, r, number(factor))
    p = builder.fadd(_fma(builder, builder.fmul(p, r), r, r), number(1.0))
    exponent = builder.shl(builder.bitcast(shifted, _V32), _constants([23] * 16))
    return builder.bitcast(builder.add(builder.bitcast(p, _V32), exponent), _VF)


def _bounded(builder: Any, y: Any, low: float, high: float) -> Any:
    for sign, bound in (("<", low), (">", high)):
        limit = ir.Constant(_VF, [bound] * 16)
        y = builder.select(builder.fcmp_ordered(sign, y, limit), limit, y)  # NaN stays
    return y


def _store(builder: Any, vector: Any, pointer: Any) -> None:
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=2)


def _place(context: Any, builder: Any, kind: Any, x: Any, row: Any, at: Any, vector: Any) -> None:
    """x[row, at : at + 16] = vector, in the form of a product's inputs; `at` is a multiple of 16."""
    steps = cgutils.unpack_tuple(builder, context.make_array(kind)(context, builder, x).shape)[1]
    if kind.dtype == types.float32:
        _store(builder, vector, _at(context, builder, kind, x, builder.add(builder.mul(row, steps), at)))
        return
    step = builder.add(builder.mul(builder.lshr(row, _I64(4)), steps), builder.lshr(at, _I64(5)))
    inside = builder.add(builder.shl(builder.and_(row, _I64(15)), _I64(5)), builder.and_(at, _I64(31)))
    place = _at(context, builder, kind, x, builder.add(builder.mul(step, _I64(3 * 512)), inside))
    for piece in range(3):
        bits = builder.bitcast(vector, _V32)
        high = builder.trunc(builder.lshr(bits, _constants([16] * 16)), ir.VectorType(ir.IntType(16), 16))
        _store(builder, high, builder.gep(place, [_I64(512 * piece)]))
        cut = builder.bitcast(builder.and_(bits, _constants([-65536] * 16)), _VF)
        vector = builder.fsub(vector, cut)


@intrinsic
def put(typingctx, x, row, at, values, v_at):
    """x[row, at : at + 16] = values[v_at : v_at + 16]."""

    def build(context, builder, signature, arguments):
        x, row, at, values, v_at = arguments
        vector = _vector(builder, _at(context, builder, signature.args[3], values, v_at))
        _place(context, builder, signature.args[0], x, row, at, vector)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, values, types.int64), build


@intrinsic
def put_sum(typingctx, x, row, at, values, v_at):
    """float32: x[row, at : at + 16] += values[v_at : v_at + 16]."""

    def build(context, builder, signature, arguments):
        x, row, at, values, v_at = arguments
        steps = cgutils.unpack_tuple(
            builder, context.make_array(signature.args[0])(context, builder, x).shape
        )[1]
        place = _at(context, builder, signature.args[0], x, builder.add(builder.mul(row, steps), at))
        vector = _vector(builder, _at(context, builder, signature.args[3], values, v_at))
        _store(builder, builder.fadd(_vector(builder, place), vector), place)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, values, types.int64), build


@intrinsic
def put_gated(typingctx, x, row, at, products, p_at):
    """x[row, at : at + 16] = silu(g) * u, silu(g) = g / (1 + exp(-g)); g and u side by side in products, from p_at."""

    def build(context, builder, signature, arguments):
        x, row, at, products, p_at = arguments
        pointer = _at(context, builder, signature.args[3], products, p_at)
        g, u = _vector(builder, pointer), _vector(builder, builder.gep(pointer, [_I64(16)]))
        power = _exp(builder, _bounded(builder, builder.fsub(ir.Constant(_VF, [-0.0] * 16), g), -87.0, 87.0))
        below = builder.fadd(power, ir.Constant(_VF, [1.0] * 16))
        _place(context, builder, signature.args[0], x, row, at, builder.fdiv(builder.fmul(g, u), below))
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, products, types.int64), build


def _across(builder: Any, combine: Any, vector: Any) -> Any:
    """One number of a vector's lanes, combined in twos."""
    for step in (8, 4, 2, 1):
        order = _constants([lane ^ step for lane in range(16)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, order))
    return builder.extract_element(vector, _I32(0))


@intrinsic
def softmax(typingctx, scores, at, num, scaling):
    """x = scores[at : at + num]: exp(scaling * (x - max x)) in place, zeros behind it up to a vector's end; their sum."""

    def build(context, builder, signature, arguments):
        scores, at, num, scaling = arguments
        first = _at(context, builder, signature.args[0], scores, at)
        low = ir.Constant(_VF, [float("-inf")] * 16)
        top, total = cgutils.alloca_once(builder, _VF), cgutils.alloca_once(builder, _VF)
        builder.store(low, top)
        builder.store(ir.Constant(_VF, [0.0] * 16), total)
        lanes = _constants(range(16), ir.VectorType(_I64, 16))
        with cgutils.for_range_slice(builder, _I64(0), num, _I64(16), _I64) as (i, _):
            index = builder.add(_splat(builder, i, ir.VectorType(_I64, 16)), lanes)
            inside = builder.icmp_signed("<", index, _splat(builder, num, ir.VectorType(_I64, 16)))
            x = builder.select(inside, _vector(builder, builder.gep(first, [i])), low)
            _store(builder, x, builder.gep(first, [i]))
            largest = builder.load(top)
            builder.store(builder.select(builder.fcmp_unordered(">", x, largest), x, largest), top)

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_unordered(">", a, b), a, b)

        most = _splat(builder, _across(builder, larger, builder.load(top)))
        factor = _splat(builder, scaling)
        with cgutils.for_range_slice(builder, _I64(0), num, _I64(16), _I64) as (i, _):
            x = _vector(builder, builder.gep(first, [i]))
            y = builder.fmul(builder.fsub(x, most), factor)
            is_none = builder.fcmp_ordered("==", x, low)
            p = builder.select(
                is_none, ir.Constant(_VF, [0.0] * 16), _exp(builder, _bounded(builder, y, -87.0, 87.0))
            )
            _store(builder, p, builder.gep(first, [i]))
            builder.store(builder.fadd(builder.load(total), p), total)
        return _across(builder, builder.fadd, builder.load(total))

    return types.float32(scores, types.int64, types.int64, types.float32), build


@intrinsic
def maxima(typingctx, x, at, num, out, out_at):
    """out[out_at : out_at + 16] = the largest of each lane of `num` vectors from x[at] on; no NaN."""

    def build(context, builder, signature, arguments):
        x, at, num, out, out_at = arguments
        first = _at(context, builder, signature.args[0], x, at)
        top = cgutils.alloca_once(builder, _VF)
        builder.store(_vector(builder, first), top)
        with cgutils.for_range_slice(builder, _I64(1), num, _I64(1), _I64) as (i, _):
            values = _vector(builder, builder.gep(first, [builder.shl(i, _I64(4))]))
            largest = builder.load(top)
            builder.store(builder.select(builder.fcmp_ordered(">", values, largest), values, largest), top)
        _store(builder, builder.load(top), _at(context, builder, signature.args[3], out, out_at))
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, out, types.int64), build


def _store_marked(builder: Any, mask: Any, num: Any, first: Any, pointer: Any) -> None:
    """pointer[0], [1] and so on = first + each place of the mask's `num` bits that are set."""
    left = cgutils.alloca_once_value(builder, builder.zext(mask, _I32))
    with cgutils.for_range(builder, num, intp=_I64) as loop:
        bits = builder.load(left)
        lane = builder.cttz(bits, ir.Constant(ir.IntType(1), 1))
        builder.store(builder.add(first, lane), builder.gep(pointer, [loop.index]))
        builder.store(builder.and_(bits, builder.sub(bits, _I32(1))), left)


@intrinsic
def keep(typingctx, x, num, least, places):
    """Places of what is `least` or more in the first `num` vectors of x, in order; how many there are."""

    def build(context, builder, signature, arguments):
        x, num, least, places = arguments
        first = _at(context, builder, signature.args[0], x, _I64(0))
        lanes, limit = _constants(range(16)), _splat(builder, least)
        bits = ir.VectorType(ir.IntType(1), 16)
        count = cgutils.alloca_once_value(builder, _I64(0))
        with cgutils.for_range_slice(builder, _I64(0), num, _I64(1), _I64) as (i, _):
            at = builder.shl(i, _I64(4))
            wanted = builder.fcmp_ordered(">=", _vector(builder, builder.gep(first, [at])), limit)
            here = builder.add(lanes, _splat(builder, builder.trunc(at, _I32), _V32))
            so_far = builder.load(count)
            pointer = _at(context, builder, signature.args[3], places, so_far)
            mask = builder.bitcast(wanted, ir.IntType(16))
            num_here = builder.ctpop(mask)
            if HAS_WIDE_REGISTERS:
                form = ir.FunctionType(ir.VoidType(), [_V32, pointer.type, bits])
                store = cgutils.get_or_insert_function(
                    builder.module, form, "llvm.masked.compressstore.v16i32"
                )
                builder.call(store, [here, pointer, wanted])
            else:  # would become a branch for each lane, and most vectors have nothing to keep
                _store_marked(builder, mask, builder.zext(num_here, _I64), builder.trunc(at, _I32), pointer)
            builder.store(builder.add(so_far, builder.zext(num_here, _I64)), count)
        return builder.load(count)

    return types.int64(x, types.int64, types.float32, places), build


@intrinsic
def exp_sum(typingctx, x, num, top):
    """The sum of exp(x - top) over the first `num` vectors of x; none of them is above `top`, nor is it infinite."""

    def build(context, builder, signature, arguments):
        x, num, top = arguments
        first = _at(context, builder, signature.args[0], x, _I64(0))
        most, low = _splat(builder, top), ir.Constant(_VF, [-87.0] * 16)
        total = cgutils.alloca_once(builder, _VF)
        builder.store(ir.Constant(_VF, [0.0] * 16), total)
        with cgutils.for_range_slice(builder, _I64(0), num, _I64(1), _I64) as (i, _):
            y = builder.fsub(_vector(builder, builder.gep(first, [builder.shl(i, _I64(4))])), most)
            y = builder.select(
                builder.fcmp_ordered("<", y, low), low, y
            )  # 1e-38: nothing beside the largest's 1
            builder.store(builder.fadd(builder.load(total), _exp(builder, y)), total)
        return _across(builder, builder.fadd, builder.load(total))

    return types.float32(x, types.int64, types.float32), build


@intrinsic(prefer_literal=True)
def weighted(typingctx, rows, blocks, p, p_at, sums, s_at, values, base, slots, num, dim, d, x, row, at):
    """x[row, at + r * dim + d : ... + 16 * blocks] = sums over i of p[r, i] * values of slots[i], over sums[s_at + r].

    Sums run over 64 keys at a time, and then over those.
    """
    num_rows, num_blocks = rows.literal_value, blocks.literal_value

    def build(context, builder, signature, arguments):
        p_type, sums_type, v_type, slots_type, x_type = (signature.args[i] for i in (2, 4, 6, 8, 12))
        _, _, p, p_at, sums, s_at, values, base, slots, num, dim, d, x, row, at = arguments
        stride = cgutils.unpack_tuple(builder, context.make_array(p_type)(context, builder, p).shape)[1]
        zero = ir.Constant(_VF, [0.0] * 16)
        places = [(r, b) for r in range(num_rows) for b in range(num_blocks)]
        parts = {place: cgutils.alloca_once(builder, _VF) for place in places}
        totals = {place: cgutils.alloca_once(builder, _VF) for place in places}
        for place in places:
            builder.store(zero, totals[place])
        shares = [
            _at(context, builder, p_type, p, builder.add(p_at, builder.mul(stride, _I64(r))))
            for r in range(num_rows)
        ]
        first = _at(context, builder, v_type, values, builder.add(base, d))
        with cgutils.for_range_slice(builder, _I64(0), num, _I64(_KEYS_OF_A_SUM), _I64) as (start, _):
            for place in places:
                builder.store(zero, parts[place])
            left = builder.sub(num, start)
            is_last = builder.icmp_signed("<", left, _I64(_KEYS_OF_A_SUM))
            count = builder.select(is_last, left, _I64(_KEYS_OF_A_SUM))
            with cgutils.for_range(builder, count, intp=_I64) as loop:
                i = builder.add(start, loop.index)
                slot = builder.load(_at(context, builder, slots_type, slots, i))
                value = builder.gep(first, [builder.mul(slot, dim)])
                vectors = [_vector(builder, builder.gep(value, [_I64(16 * b)])) for b in range(num_blocks)]
                for r in range(num_rows):
                    share = _splat(builder, builder.load(builder.gep(shares[r], [i])))
                    for b in range(num_blocks):
                        so_far = builder.load(parts[r, b])
                        builder.store(_fma(builder, share, vectors[b], so_far), parts[r, b])
            for place in places:
                both = builder.fadd(builder.load(totals[place]), builder.load(parts[place]))
                builder.store(both, totals[place])
        for r in range(num_rows):
            whole = _at(context, builder, sums_type, sums, builder.add(s_at, _I64(r)))
            divisor = _splat(builder, builder.load(whole))
            for b in range(num_blocks):
                column = builder.add(builder.add(at, builder.mul(dim, _I64(r))), builder.add(d, _I64(16 * b)))
                result = builder.fdiv(builder.load(totals[r, b]), divisor)
                _place(context, builder, x_type, x, row, column, result)
        return context.get_dummy_value()

    n = types.int64
    return types.void(rows, blocks, p, n, sums, n, values, n, slots, n, n, n, x, n, n), build


@intrinsic
def turn(typingctx, x, x_at, cos, sin, at, dim, y, y_at):
    """y[y_at + d] = x[d] * cos[d] + x[(d + dim / 2) % dim] * sin[d], x from x_at on, cos and sin from `at` on.

    `dim` is a multiple of 32; x and y may be the same place.
    """

    def build(context, builder, signature, arguments):
        kinds = signature.args
        x, x_at, cos, sin, at, dim, y, y_at = arguments
        half = builder.lshr(dim, _I64(1))
        source, target = _at(context, builder, kinds[0], x, x_at), _at(context, builder, kinds[6], y, y_at)
        tables = [
            _at(context, builder, kind, table, at) for kind, table in ((kinds[2], cos), (kinds[3], sin))
        ]
        with cgutils.for_range_slice(builder, _I64(0), half, _I64(16), _I64) as (d, _):
            places = (d, builder.add(d, half))
            a, b = (_vector(builder, builder.gep(source, [place])) for place in places)
            for place, own, other in ((places[0], a, b), (places[1], b, a)):
                c, s = (_vector(builder, builder.gep(table, [place])) for table in tables)
                _store(builder, _fma(builder, own, c, builder.fmul(other, s)), builder.gep(target, [place]))
        return context.get_dummy_value()

    n = types.int64
    return types.void(x, n, cos, sin, n, n, y, n), build
