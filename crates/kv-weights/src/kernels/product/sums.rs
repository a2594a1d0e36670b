//! Sums over the units of a cube.

use cubecl::prelude::*;

use super::base::ProductBlueprint;

/// Replaces each of `len` `values` by its sum over the unit's team of `team` units, which is a power of two. To be called
/// by all units of a cube. `scratch` has an entry for each unit and value.
#[cube]
pub(super) fn team_sum(
    values: &mut Array<f32>,
    scratch: &mut Shared<[f32]>,
    #[comptime] len: usize,
    #[comptime] team: usize,
    #[comptime] bp: ProductBlueprint,
) {
    let unit = UNIT_POS as usize;
    if comptime!(team <= bp.plane) {
        #[unroll]
        for i in 0..len {
            #[unroll]
            for step in 0..comptime!(team.trailing_zeros()) {
                values[i] += plane_shuffle_xor(values[i], comptime!(1u32 << step));
            }
        }
    } else {
        // What was read before from here is to be read by all before it is written over.
        sync_cube();
        #[unroll]
        for i in 0..len {
            scratch[unit * len + i] = values[i];
        }
        #[unroll]
        for step in 0..comptime!(team.trailing_zeros()) {
            sync_cube();
            let stride = comptime!(team >> (step + 1));
            if unit % team < stride {
                #[unroll]
                for i in 0..len {
                    scratch[unit * len + i] += scratch[(unit + stride) * len + i];
                }
            }
        }
        sync_cube();
        let first = unit / team * team;
        #[unroll]
        for i in 0..len {
            values[i] = scratch[first * len + i];
        }
    }
}

/// An array of zeros.
#[cube]
pub(super) fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut array = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = f32::new(0.0);
    }
    array
}
