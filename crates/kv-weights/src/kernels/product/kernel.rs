use cubecl::prelude::*;

use super::{
    base::ProductBlueprint,
    sums::{team_sum, zeros},
};
use crate::{
    Gate,
    formats::cube::{BlocksInKernels, SPAN, Span, code, new_span, number, unpack_row},
};

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ProductArgs {
    /// Rows of activations.
    pub(super) n: usize,
    /// Spans of a row.
    pub(super) spans: usize,
    pub(super) row_bytes: usize,
    /// Numbers that a row of activations makes.
    pub(super) outputs: usize,
    /// Those of the first two parts.
    pub(super) first_outputs: usize,
    pub(super) second_outputs: usize,
    /// Cubes of a chunk of activations, and those of the first two parts.
    pub(super) cubes: usize,
    pub(super) first_cubes: usize,
    pub(super) second_cubes: usize,
    pub(super) epsilon: f32,
}

/// What a unit works on.
#[derive(CubeType)]
struct Share {
    /// Its index in its team.
    lane: usize,
    /// The first of its rows in its part; the others are a number of teams apart.
    row: usize,
    /// Outputs of the part.
    rows: usize,
    /// Outputs of the parts before.
    before: usize,
    /// The first row of activations, and of outputs.
    first_x: usize,
}

/// One cube for some outputs of one part and a chunk of activations.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn product<F: BlocksInKernels>(
    x: &[Vector<f32, Const<4>>],
    first: &[u32],
    second: ComptimeOption<Box<[u32]>>,
    third: ComptimeOption<Box<[u32]>>,
    norm: ComptimeOption<Box<[Vector<f32, Const<4>>]>>,
    bias: ComptimeOption<Box<[f32]>>,
    residual: ComptimeOption<Box<[f32]>>,
    out: &mut [f32],
    args: ProductArgs,
    #[comptime] bp: ProductBlueprint,
) {
    let first_x = CUBE_POS / args.cubes * comptime!(bp.x_rows);
    if first_x >= args.n {
        terminate!();
    }
    let share = share_of(first_x, &args, bp);
    let mut totals = zeros(comptime!(bp.sums()));
    if comptime!(bp.gate.is_some()) {
        #[comptime]
        match second {
            ComptimeOption::Some(second) => {
                add::<F>(x, &norm, first, &second, 0, &share, &mut totals, &args, bp);
            }
            ComptimeOption::None => {
                add::<F>(x, &norm, first, first, share.rows, &share, &mut totals, &args, bp);
            }
        }
    } else if comptime!(bp.parts == 1) {
        add::<F>(x, &norm, first, first, 0, &share, &mut totals, &args, bp);
    } else {
        if share.before == 0 {
            add::<F>(x, &norm, first, first, 0, &share, &mut totals, &args, bp);
        }
        #[comptime]
        match second {
            ComptimeOption::Some(second) => {
                if share.before == args.first_outputs {
                    add::<F>(x, &norm, &second, &second, 0, &share, &mut totals, &args, bp);
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match third {
            ComptimeOption::Some(third) => {
                if share.before > args.first_outputs {
                    add::<F>(x, &norm, &third, &third, 0, &share, &mut totals, &args, bp);
                }
            }
            ComptimeOption::None => {}
        }
    }
    let mut scratch = Shared::<[f32]>::new_slice(comptime!(bp.scratch_len()));
    team_sum(&mut totals, &mut scratch, bp);
    if share.lane == 0 {
        write(&totals, &bias, &residual, out, &share, &args, bp);
    }
}

/// One cube for some outputs of one pick: the product of a row of activations, that of `shared` picks, with the rows of
/// the expert that was picked.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn picked_product<F: BlocksInKernels>(
    x: &[Vector<f32, Const<4>>],
    words: &[u32],
    picked: &[i32],
    out: &mut [f32],
    args: ProductArgs,
    stride: usize,
    shared: usize,
    #[comptime] bp: ProductBlueprint,
) {
    let pick = CUBE_POS / args.cubes;
    if pick >= args.n {
        terminate!();
    }
    let mut share = share_of(pick / shared, &args, bp);
    let first = picked[pick] as usize * stride;
    let expert = words.slice(first, first + stride);
    let mut totals = zeros(comptime!(bp.sums()));
    add::<F>(x, &ComptimeOption::new_None(), expert, expert, 0, &share, &mut totals, &args, bp);
    let mut scratch = Shared::<[f32]>::new_slice(comptime!(bp.scratch_len()));
    team_sum(&mut totals, &mut scratch, bp);
    share.first_x = pick;
    if share.lane == 0 {
        let none = ComptimeOption::new_None();
        write(&totals, &none, &none, out, &share, &args, bp);
    }
}

#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
fn share_of(first_x: usize, args: &ProductArgs, #[comptime] bp: ProductBlueprint) -> Share {
    let unit = UNIT_POS as usize;
    let mut cube = CUBE_POS % args.cubes;
    let mut rows = args.first_outputs;
    let mut before = 0usize.runtime();
    if comptime!(bp.parts > 1 && bp.gate.is_none()) {
        if cube >= args.first_cubes {
            cube -= args.first_cubes;
            before = args.first_outputs;
            rows = args.second_outputs;
            if cube >= args.second_cubes {
                cube -= args.second_cubes;
                before = args.first_outputs + args.second_outputs;
                rows = args.outputs - before;
            }
        }
    }
    let row = cube * comptime!(bp.cube_rows()) + unit / bp.lanes;
    Share { lane: unit % bp.lanes, row, rows, before, first_x }
}

/// Adds the products of the unit's rows with its spans of the activations to `totals`. The other rows of gated outputs
/// are those of `others` that are `shift` further.
#[cube]
fn add<F: BlocksInKernels>(
    x: &[Vector<f32, Const<4>>],
    norm: &ComptimeOption<Box<[Vector<f32, Const<4>>]>>,
    words: &[u32],
    others: &[u32],
    shift: usize,
    share: &Share,
    totals: &mut Array<f32>,
    args: &ProductArgs,
    #[comptime] bp: ProductBlueprint,
) {
    let mut index = share.lane;
    while index < args.spans {
        let mut spans = Sequence::<Span>::new();
        #[unroll]
        for r in 0..bp.unit_rows {
            // Rows past the last are read as the last one, and not written.
            let row = clamp_max(share.row + r * comptime!(bp.teams()), share.rows - 1);
            let mut span = new_span::<F>();
            unpack_row::<F>(words, row, index, args.row_bytes, &mut span);
            spans.push(span);
            if comptime!(bp.gate.is_some()) {
                let mut span = new_span::<F>();
                unpack_row::<F>(others, row + shift, index, args.row_bytes, &mut span);
                spans.push(span);
            }
        }
        add_spans::<F>(x, norm, index, &spans, share, totals, args, bp);
        index += comptime!(bp.lanes);
    }
}

/// Adds the products of unpacked spans with the cube's rows of the activations. A code is made a
/// number once for all of these. Minima are added to weights: times the sums of activations they
/// would cancel products of codes that are far larger than what is left.
#[cube]
fn add_spans<F: BlocksInKernels>(
    x: &[Vector<f32, Const<4>>],
    norm: &ComptimeOption<Box<[Vector<f32, Const<4>>]>>,
    index: usize,
    spans: &Sequence<Span>,
    share: &Share,
    totals: &mut Array<f32>,
    args: &ProductArgs,
    #[comptime] bp: ProductBlueprint,
) {
    let rows = comptime!(bp.unit_rows * bp.width());
    let mut sums = zeros(comptime!(bp.products()));
    #[unroll]
    for i in 0..comptime!(SPAN / 4) {
        let mut numbers = Array::<f32>::new(comptime!(4 * rows));
        #[unroll]
        for r in 0..rows {
            #[unroll]
            for k in 0..4usize {
                if comptime!(F::MINS) {
                    numbers[comptime!(4 * r + k)] =
                        number::<F>(spans.index(r), comptime!(4 * i + k));
                } else {
                    numbers[comptime!(4 * r + k)] = code::<F>(spans.index(r), comptime!(4 * i + k));
                }
            }
        }
        #[unroll]
        for j in 0..bp.x_rows {
            // Rows past the last are read as the last one, and not written.
            let row = clamp_max(share.first_x + j, args.n - 1);
            let mut four = x[(row * args.spans + index) * comptime!(SPAN / 4) + i];
            #[comptime]
            match norm {
                ComptimeOption::Some(gains) => {
                    totals[comptime!(bp.products() + j)] += sum_of(four * four);
                    let mut gain = gains[index * comptime!(SPAN / 4) + i];
                    if comptime!(bp.plus_one) {
                        gain += Vector::<f32, Const<4>>::new(1.0f32);
                    }
                    four *= gain;
                }
                ComptimeOption::None => {}
            }
            #[unroll]
            for r in 0..rows {
                #[unroll]
                for k in 0..4usize {
                    sums[comptime!(r * bp.x_rows + j)] +=
                        numbers[comptime!(4 * r + k)] * four.extract(k);
                }
            }
        }
        if comptime!(F::HALVES && i == SPAN / 8 - 1) {
            #[unroll]
            for r in 0..rows {
                #[unroll]
                for j in 0..bp.x_rows {
                    let at = comptime!(r * bp.x_rows + j);
                    totals[at] += sums[at] * spans.index(r).low;
                    sums[at] = f32::new(0.0);
                }
            }
        }
    }
    #[unroll]
    for r in 0..rows {
        let span = spans.index(r);
        let mut scale = span.low;
        if comptime!(F::HALVES) {
            scale = span.high;
        }
        #[unroll]
        for j in 0..bp.x_rows {
            let at = comptime!(r * bp.x_rows + j);
            if comptime!(F::SCALES && !F::MINS) {
                totals[at] += sums[at] * scale;
            } else {
                totals[at] += sums[at];
            }
        }
    }
}

#[cube]
fn sum_of(four: Vector<f32, Const<4>>) -> f32 {
    (four.extract(0usize) + four.extract(1usize)) + (four.extract(2usize) + four.extract(3usize))
}

/// What a row of activations is multiplied with by its norm, without the gains.
#[cube]
fn factor(
    totals: &Array<f32>,
    #[comptime] x_row: usize,
    args: &ProductArgs,
    #[comptime] bp: ProductBlueprint,
) -> f32 {
    let mut factor = f32::new(1.0);
    if comptime!(bp.norm) {
        let squares = totals[comptime!(bp.products() + x_row)];
        factor = 1.0f32 / (squares / f32::cast_from(args.spans * SPAN) + args.epsilon).sqrt();
    }
    factor
}

#[cube]
fn write(
    totals: &Array<f32>,
    bias: &ComptimeOption<Box<[f32]>>,
    residual: &ComptimeOption<Box<[f32]>>,
    out: &mut [f32],
    share: &Share,
    args: &ProductArgs,
    #[comptime] bp: ProductBlueprint,
) {
    #[unroll]
    for r in 0..bp.unit_rows {
        let row = share.row + r * comptime!(bp.teams());
        #[unroll]
        for i in 0..bp.x_rows {
            if row < share.rows && share.first_x + i < args.n {
                let column = share.before + row;
                let at = (share.first_x + i) * args.outputs + column;
                let sum = comptime!(r * bp.width() * bp.x_rows + i);
                let factor = factor(totals, i, args, bp);
                let mut y = totals[sum] * factor;
                #[comptime]
                match bias {
                    ComptimeOption::Some(bias) => y += bias[column],
                    ComptimeOption::None => {}
                }
                if comptime!(bp.gate.is_some()) {
                    let mut up = totals[comptime!(sum + bp.x_rows)] * factor;
                    #[comptime]
                    match bias {
                        ComptimeOption::Some(bias) => up += bias[column + args.outputs],
                        ComptimeOption::None => {}
                    }
                    y = gated(y, bp) * up;
                }
                #[comptime]
                match residual {
                    ComptimeOption::Some(residual) => y += residual[at],
                    ComptimeOption::None => {}
                }
                out[at] = y;
            }
        }
    }
}

/// What a gate goes through.
#[cube]
fn gated(x: f32, #[comptime] bp: ProductBlueprint) -> f32 {
    let mut z = x;
    if comptime!(bp.gate == Some(Gate::GeluTanh)) {
        // (1 + tanh(z)) / 2 is the logistic function of 2 z.
        z = (x + 0.044_715f32 * x * x * x) * 1.595_769f32;
    }
    x / (1.0f32 + (-z).exp())
}
