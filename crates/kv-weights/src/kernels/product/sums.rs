//! Sums over the units of a cube.

use cubecl::prelude::*;

use super::base::ProductBlueprint;

/// Replaces each of the unit's `values` by its sum over the team. All units of a cube must call it.
#[cube]
pub(super) fn team_sum(
    values: &mut Array<f32>,
    scratch: &mut Shared<[f32]>,
    #[comptime] bp: ProductBlueprint,
) {
    let len = comptime!(bp.sums());
    let steps = comptime!(bp.lanes.trailing_zeros());
    if comptime!(bp.plane > 1) {
        #[unroll]
        for i in 0..len {
            #[unroll]
            for step in 0..steps {
                values[i] += plane_shuffle_xor(values[i], comptime!(1u32 << step));
            }
        }
    } else if comptime!(bp.lanes > 1) {
        let unit = UNIT_POS as usize;
        #[unroll]
        for i in 0..len {
            scratch[unit * len + i] = values[i];
        }
        #[unroll]
        for step in 0..steps {
            sync_cube();
            let stride = comptime!(bp.lanes >> (step + 1));
            if unit % bp.lanes < stride {
                #[unroll]
                for i in 0..len {
                    scratch[unit * len + i] += scratch[(unit + stride) * len + i];
                }
            }
        }
        sync_cube();
        let first = unit / bp.lanes * bp.lanes;
        #[unroll]
        for i in 0..len {
            values[i] = scratch[first * len + i];
        }
    }
}

#[cube]
pub(super) fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut array = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = f32::new(0.0);
    }
    array
}
