use cubecl::prelude::*;

use super::{
    base::ProductBlueprint,
    sums::{team_sum, zeros},
};
use crate::{
    Gate,
    formats::cube::{BlocksInKernels, SPAN, Span, code, new_span, number, unpack_row},
};

/// Run-time arguments of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ProductArgs {
    /// Rows of activations.
    pub(super) n: usize,
    /// Spans per row.
    pub(super) spans: usize,
    pub(super) row_bytes: usize,
    /// Outputs per row of activations.
    pub(super) outputs: usize,
    /// Outputs of the first part, then of the second.
    pub(super) first_outputs: usize,
    pub(super) second_outputs: usize,
    /// Cubes per chunk of activations, then those of the first part and of the second.
    pub(super) cubes: usize,
    pub(super) first_cubes: usize,
    pub(super) second_cubes: usize,
    pub(super) epsilon: f32,
}

/// Matrices after the first.
#[derive(CubeType, CubeLaunch)]
pub(super) struct OtherParts {
    pub(super) second: ComptimeOption<Box<[u32]>>,
    pub(super) third: ComptimeOption<Box<[u32]>>,
}

/// Optional operands around the product.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Extras {
    /// Gains of the norm.
    pub(super) norm: ComptimeOption<Box<[Vector<f32, Const<4>>]>>,
    pub(super) bias: ComptimeOption<Box<[f32]>>,
    pub(super) residual: ComptimeOption<Box<[f32]>>,
}

/// The work of one unit.
#[derive(CubeType)]
struct Share {
    args: ProductArgs,
    /// Index of the unit in its team.
    lane: usize,
    /// First row of the unit in its part. Its other rows follow at a distance of the number of
    /// teams.
    row: usize,
    /// Outputs of its part.
    rows: usize,
    /// Outputs of all parts before.
    before: usize,
    /// First row of activations and outputs.
    first_x: usize,
}

/// Computes some outputs of one part for a chunk of activations in each cube.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn product<F: BlocksInKernels>(
    x: &[Vector<f32, Const<4>>],
    first: &[u32],
    others: OtherParts,
    extras: Extras,
    out: &mut [f32],
    args: ProductArgs,
    #[comptime] bp: ProductBlueprint,
) {
    let first_x = CUBE_POS / args.cubes * comptime!(bp.x_rows);
    if first_x >= args.n {
        terminate!();
    }
    let share = share_of(first_x, args, bp);
    let mut totals = zeros(comptime!(bp.sums()));
    if comptime!(bp.gate.is_some()) {
        #[comptime]
        match others.second {
            ComptimeOption::Some(second) => {
                add::<F>(x, &extras, first, &second, 0, &share, &mut totals, bp);
            }
            ComptimeOption::None => {
                add::<F>(x, &extras, first, first, share.rows, &share, &mut totals, bp);
            }
        }
    } else if comptime!(bp.parts == 1) {
        add::<F>(x, &extras, first, first, 0, &share, &mut totals, bp);
    } else {
        if share.before == 0 {
            add::<F>(x, &extras, first, first, 0, &share, &mut totals, bp);
        }
        #[comptime]
        match others.second {
            ComptimeOption::Some(second) => {
                if share.before == share.args.first_outputs {
                    add::<F>(x, &extras, &second, &second, 0, &share, &mut totals, bp);
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match others.third {
            ComptimeOption::Some(third) => {
                if share.before > share.args.first_outputs {
                    add::<F>(x, &extras, &third, &third, 0, &share, &mut totals, bp);
                }
            }
            ComptimeOption::None => {}
        }
    }
    let mut scratch = Shared::<[f32]>::new_slice(comptime!(bp.scratch_len()));
    team_sum(&mut totals, &mut scratch, bp);
    if share.lane == 0 {
        write(&totals, &extras, out, &share, bp);
    }
}

/// Computes some outputs of one pick in each cube: a row of activations, shared by `shared` picks,
/// times rows of the picked expert.
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
    let mut share = share_of(pick / shared, args, bp);
    let extras = Extras {
        norm: ComptimeOption::new_None(),
        bias: ComptimeOption::new_None(),
        residual: ComptimeOption::new_None(),
    };
    let first = picked[pick] as usize * stride;
    let expert = words.slice(first, first + stride);
    let mut totals = zeros(comptime!(bp.sums()));
    add::<F>(x, &extras, expert, expert, 0, &share, &mut totals, bp);
    let mut scratch = Shared::<[f32]>::new_slice(comptime!(bp.scratch_len()));
    team_sum(&mut totals, &mut scratch, bp);
    share.first_x = pick;
    if share.lane == 0 {
        write(&totals, &extras, out, &share, bp);
    }
}

#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
fn share_of(first_x: usize, args: ProductArgs, #[comptime] bp: ProductBlueprint) -> Share {
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
    Share { args, lane: unit % bp.lanes, row, rows, before, first_x }
}

/// Adds the products of the unit's rows with its spans of the activations to `totals`. For gated
/// outputs, the second rows are those of `others` that are `shift` further.
#[cube]
fn add<F: BlocksInKernels>(
    x: &[Vector<f32, Const<4>>],
    extras: &Extras,
    words: &[u32],
    others: &[u32],
    shift: usize,
    share: &Share,
    totals: &mut Array<f32>,
    #[comptime] bp: ProductBlueprint,
) {
    let row_bytes = share.args.row_bytes;
    let mut index = share.lane;
    while index < share.args.spans {
        let mut spans = Sequence::<Span>::new();
        #[unroll]
        for r in 0..bp.unit_rows {
            // Rows past the end are read as the last row and not written.
            let row = clamp_max(share.row + r * comptime!(bp.teams()), share.rows - 1);
            let mut span = new_span::<F>();
            unpack_row::<F>(words, row, index, row_bytes, &mut span);
            spans.push(span);
            if comptime!(bp.gate.is_some()) {
                let mut span = new_span::<F>();
                unpack_row::<F>(others, row + shift, index, row_bytes, &mut span);
                spans.push(span);
            }
        }
        add_spans::<F>(x, extras, index, &spans, share, totals, bp);
        index += comptime!(bp.lanes);
    }
}

/// Adds the products of unpacked spans with the cube's rows of activations. Each code is converted
/// to a float once for all of these. Minima are added to weights: multiplied with the sum of
/// activations instead, they could cancel products of codes that are far larger than the result.
#[cube]
fn add_spans<F: BlocksInKernels>(
    x: &[Vector<f32, Const<4>>],
    extras: &Extras,
    index: usize,
    spans: &Sequence<Span>,
    share: &Share,
    totals: &mut Array<f32>,
    #[comptime] bp: ProductBlueprint,
) {
    let rows = comptime!(bp.unit_rows * bp.width());
    let mut sums = zeros(comptime!(bp.products()));
    #[unroll]
    for i in 0..comptime!(SPAN / 4) {
        let numbers = four_of_each::<F>(spans, i, rows);
        #[unroll]
        for j in 0..bp.x_rows {
            let four = activations(x, extras, index, i, j, share, totals, bp);
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
            add_scaled::<F>(&sums, spans, totals, false, bp);
            #[unroll]
            for at in 0..comptime!(bp.products()) {
                sums[at] = f32::new(0.0);
            }
        }
    }
    add_scaled::<F>(&sums, spans, totals, F::HALVES, bp);
}

/// Returns four numbers of each span, from number `4 * i` on, without scales unless there are
/// minima.
#[cube]
fn four_of_each<F: BlocksInKernels>(
    spans: &Sequence<Span>,
    #[comptime] i: usize,
    #[comptime] rows: usize,
) -> Array<f32> {
    let mut numbers = Array::<f32>::new(comptime!(4 * rows));
    #[unroll]
    for r in 0..rows {
        #[unroll]
        for k in 0..4usize {
            if comptime!(F::MINS) {
                numbers[comptime!(4 * r + k)] = number::<F>(spans.index(r), comptime!(4 * i + k));
            } else {
                numbers[comptime!(4 * r + k)] = code::<F>(spans.index(r), comptime!(4 * i + k));
            }
        }
    }
    numbers
}

/// Returns vector `i` of span `index` of the cube's row `j` of activations. With a norm, it is
/// multiplied with the gains, and its squares are added to `totals`.
#[cube]
fn activations(
    x: &[Vector<f32, Const<4>>],
    extras: &Extras,
    index: usize,
    #[comptime] i: usize,
    #[comptime] j: usize,
    share: &Share,
    totals: &mut Array<f32>,
    #[comptime] bp: ProductBlueprint,
) -> Vector<f32, Const<4>> {
    // Rows past the end are read as the last row and not written.
    let row = clamp_max(share.first_x + j, share.args.n - 1);
    let mut four = x[(row * share.args.spans + index) * comptime!(SPAN / 4) + i];
    #[comptime]
    match &extras.norm {
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
    four
}

/// Adds sums times the scales of their spans to `totals`. If `second_halves`, the scales are those
/// of the second halves.
#[cube]
fn add_scaled<F: BlocksInKernels>(
    sums: &Array<f32>,
    spans: &Sequence<Span>,
    totals: &mut Array<f32>,
    #[comptime] second_halves: bool,
    #[comptime] bp: ProductBlueprint,
) {
    #[unroll]
    for r in 0..comptime!(bp.unit_rows * bp.width()) {
        let span = spans.index(r);
        let mut scale = span.low;
        if comptime!(second_halves) {
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

/// Returns the factor of the norm for a row of activations, without the gains.
#[cube]
fn factor(
    totals: &Array<f32>,
    #[comptime] x_row: usize,
    share: &Share,
    #[comptime] bp: ProductBlueprint,
) -> f32 {
    let mut factor = f32::new(1.0);
    if comptime!(bp.norm) {
        let squares = totals[comptime!(bp.products() + x_row)];
        factor = 1.0f32
            / (squares / f32::cast_from(share.args.spans * SPAN) + share.args.epsilon).sqrt();
    }
    factor
}

#[cube]
fn write(
    totals: &Array<f32>,
    extras: &Extras,
    out: &mut [f32],
    share: &Share,
    #[comptime] bp: ProductBlueprint,
) {
    #[unroll]
    for r in 0..bp.unit_rows {
        let row = share.row + r * comptime!(bp.teams());
        #[unroll]
        for i in 0..bp.x_rows {
            if row < share.rows && share.first_x + i < share.args.n {
                let column = share.before + row;
                let at = (share.first_x + i) * share.args.outputs + column;
                let sum = comptime!(r * bp.width() * bp.x_rows + i);
                let factor = factor(totals, i, share, bp);
                let mut y = totals[sum] * factor;
                #[comptime]
                match &extras.bias {
                    ComptimeOption::Some(bias) => y += bias[column],
                    ComptimeOption::None => {}
                }
                if comptime!(bp.gate.is_some()) {
                    let mut up = totals[comptime!(sum + bp.x_rows)] * factor;
                    #[comptime]
                    match &extras.bias {
                        ComptimeOption::Some(bias) => up += bias[column + share.args.outputs],
                        ComptimeOption::None => {}
                    }
                    y = gated(y, bp) * up;
                }
                #[comptime]
                match &extras.residual {
                    ComptimeOption::Some(residual) => y += residual[at],
                    ComptimeOption::None => {}
                }
                out[at] = y;
            }
        }
    }
}

#[cube]
fn gated(x: f32, #[comptime] bp: ProductBlueprint) -> f32 {
    let mut z = x;
    if comptime!(bp.gate == Some(Gate::GeluTanh)) {
        // (1 + tanh(z)) / 2 is the logistic function of 2 z.
        z = (x + 0.044_715f32 * x * x * x) * 1.595_769f32;
    }
    x / (1.0f32 + (-z).exp())
}
