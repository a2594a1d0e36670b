//! Products with the experts that a router selected.

use kv_device::threads::in_parts;

use super::{MANY, stacked::Stacked, tuning::PARALLEL};
use crate::{ExpertSelection, PackedLayout};

/// An expert and the picks that selected it.
pub(super) struct Expert<'a> {
    pub(super) blocks: &'a [u8],
    /// The row of activations of each pick.
    pub(super) inputs: Vec<usize>,
}

/// Returns the products of the activations of each pick with the expert that it selected,
/// `[picks, rows]`. An expert is read once for all of its picks.
pub(super) fn project(
    x: &[f32],
    words: &[u32],
    picked: &[i32],
    layout: PackedLayout,
    picks: ExpertSelection,
) -> Vec<f32> {
    let mut slots: Vec<usize> = (0..picked.len()).collect();
    slots.sort_by_key(|&slot| picked[slot]);
    let slots: Vec<_> = slots.chunk_by(|&a, &b| picked[a] == picked[b]).collect();
    let expert = |slots: &&[usize]| {
        let words = &words[picked[slots[0]] as usize * picks.stride..];
        let blocks = &bytemuck::cast_slice::<u32, u8>(words)[..layout.bytes()];
        Expert { blocks, inputs: slots.iter().map(|slot| slot / picks.shared).collect() }
    };
    let experts: Vec<_> = slots.iter().map(expert).collect();
    let rows = layout.rows();
    let mut out = vec![0.0; picked.len() * rows];
    for (slots, products) in slots.into_iter().zip(products(x, &experts, layout, picks)) {
        for (&slot, products) in slots.iter().zip(products.chunks_exact(rows)) {
            out[slot * rows..][..rows].copy_from_slice(products);
        }
    }
    out
}

/// Returns the products of each expert, `[picks of the expert, rows]`.
fn products(
    x: &[f32],
    experts: &[Expert<'_>],
    layout: PackedLayout,
    ExpertSelection { activations, .. }: ExpertSelection,
) -> Vec<Vec<f32>> {
    #[cfg(target_arch = "x86_64")]
    if let Some(products) = super::vnni::project_picked(x, experts, &layout, activations) {
        return products;
    }
    let (columns, picks) =
        (layout.columns(), experts.iter().map(|e| e.inputs.len()).sum::<usize>());
    // Few picks of many experts are divided by experts, others within an expert.
    let by_expert = experts.len() >= rayon::current_num_threads()
        && picks < MANY * experts.len()
        && picks * layout.rows() * columns >= PARALLEL;
    let mut products = vec![vec![]; experts.len()];
    in_parts(experts.iter().zip(&mut products), by_expert, |(expert, products)| {
        let rows = expert.inputs.iter().map(|&row| &x[row * columns..][..columns]);
        let x = rows.collect::<Vec<_>>().concat();
        *products = super::project(&x, &Stacked::one(expert.blocks, layout), activations, None);
    });
    products
}
