use cubecl::prelude::*;

use crate::formats::cube::{BlocksInKernels, SPAN, new_span, number, unpack_row};

/// Units in a cube, a square of 8 by 8. Each unpacks one row of weights, so this is also the number
/// of rows in a tile.
pub(super) const UNITS: usize = 64;
/// Units along a side of the square, and the distance between the rows of a unit.
const SIDE: usize = 8;
/// Rows of weights per unit.
const W_ROWS: usize = UNITS / SIDE;
/// Vectors of four columns in a row of a tile.
const FOURS: usize = SPAN / 4;

/// Run-time arguments of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct TiledArgs {
    /// Rows of activations.
    pub(super) n: usize,
    /// Rows of weights.
    pub(super) rows: usize,
    /// Tiles of rows of weights.
    pub(super) tiles: usize,
    /// Spans per row.
    pub(super) spans: usize,
    pub(super) row_bytes: usize,
}

/// Multiplies `8 * x_rows` rows of activations by 64 rows of weights in each cube.
///
/// In a tile, the columns of each row are permuted by the last three bits of its row number. That
/// puts the eight rows that units read or write together into different banks.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn tiled<F: BlocksInKernels>(
    x: &[Vector<f32, Const<4>>],
    words: &[u32],
    out: &mut [f32],
    args: TiledArgs,
    #[comptime] x_rows: usize,
) {
    let first_x = CUBE_POS / args.tiles * comptime!(SIDE * x_rows);
    if first_x >= args.n {
        terminate!();
    }
    let first_w = CUBE_POS % args.tiles * UNITS;
    let unit = UNIT_POS as usize;
    let mut of_w = Shared::<[Vector<f32, Const<4>>]>::new_slice(comptime!(UNITS * FOURS));
    let mut of_x = Shared::<[Vector<f32, Const<4>>]>::new_slice(comptime!(SIDE * x_rows * FOURS));
    let mut sums = Array::<f32>::new(comptime!(W_ROWS * x_rows));
    #[unroll]
    for i in 0..comptime!(W_ROWS * x_rows) {
        sums[i] = f32::new(0.0);
    }
    // Rows past the end are read as the last row and not written.
    let row = clamp_max(first_w + unit, args.rows - 1);
    let mut index = 0usize.runtime();
    while index < args.spans {
        let mut span = new_span::<F>();
        unpack_row::<F>(words, row, index, args.row_bytes, &mut span);
        #[unroll]
        for i in 0..FOURS {
            let mut four = Vector::<f32, Const<4>>::empty();
            #[unroll]
            for k in 0..4usize {
                four.insert(k, number::<F>(&span, comptime!(4 * i + k)));
            }
            of_w[unit * FOURS + (i ^ (unit % SIDE))] = four;
        }
        #[unroll]
        for i in 0..x_rows {
            let at = i * UNITS + unit;
            let (x_row, four) = (at / FOURS, at % FOURS);
            let from = clamp_max(first_x + x_row, args.n - 1);
            of_x[x_row * FOURS + (four ^ (x_row % SIDE))] =
                x[(from * args.spans + index) * FOURS + four];
        }
        sync_cube();
        multiply(&of_w, &of_x, &mut sums, x_rows);
        sync_cube();
        index += 1usize;
    }
    write(&sums, out, first_w, first_x, &args, x_rows);
}

/// Adds the products of the unit's rows of both tiles.
#[cube]
fn multiply(
    of_w: &Shared<[Vector<f32, Const<4>>]>,
    of_x: &Shared<[Vector<f32, Const<4>>]>,
    sums: &mut Array<f32>,
    #[comptime] x_rows: usize,
) {
    let unit = UNIT_POS as usize;
    let (w_row, x_row) = (unit % SIDE, unit / SIDE);
    for four in 0..FOURS {
        let mut x = Array::<Vector<f32, Const<4>>>::new(x_rows);
        #[unroll]
        for j in 0..x_rows {
            x[j] = of_x[(x_row + SIDE * j) * FOURS + (four ^ x_row)];
        }
        #[unroll]
        for r in 0..W_ROWS {
            let w = of_w[(w_row + SIDE * r) * FOURS + (four ^ w_row)];
            #[unroll]
            for j in 0..x_rows {
                #[unroll]
                for k in 0..4usize {
                    sums[comptime!(r * x_rows + j)] += w.extract(k) * x[j].extract(k);
                }
            }
        }
    }
}

#[cube]
fn write(
    sums: &Array<f32>,
    out: &mut [f32],
    first_w: usize,
    first_x: usize,
    args: &TiledArgs,
    #[comptime] x_rows: usize,
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for j in 0..x_rows {
        #[unroll]
        for r in 0..W_ROWS {
            let row = first_w + unit % SIDE + SIDE * r;
            let of_x = first_x + unit / SIDE + SIDE * j;
            if row < args.rows && of_x < args.n {
                out[of_x * args.rows + row] = sums[comptime!(r * x_rows + j)];
            }
        }
    }
}
