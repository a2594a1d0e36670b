use cubecl::{features::Plane, ir::DeviceProperties};

use crate::{Gate, PackedLayout, WeightFormat, formats::cube::SPAN, fused::FEW};

/// `n` rows of activations by the rows of matrices of one format and width.
#[derive(Clone, Debug)]
pub(crate) struct ProductProblem {
    /// Rows of activations.
    pub(crate) n: usize,
    /// One to three matrices whose rows follow one another; with a gate, one or two of equal size.
    pub(crate) parts: Vec<PackedLayout>,
    /// What the first half of the rows goes through before it is multiplied with the second.
    pub(crate) gate: Option<Gate>,
    /// Whether activations are normed.
    pub(crate) norm: bool,
    /// What is added to the mean of squares of the norm.
    pub(crate) epsilon: f32,
    /// Whether the gains of the norm are stored less 1.
    pub(crate) plus_one: bool,
}

impl ProductProblem {
    /// Products of `n` rows with one matrix, and nothing else.
    pub(crate) fn plain(n: usize, layout: PackedLayout) -> Self {
        let parts = vec![layout];
        Self { n, parts, gate: None, norm: false, epsilon: 0.0, plus_one: false }
    }

    /// Outputs that each part makes.
    pub(super) fn part_outputs(&self) -> Vec<usize> {
        match (self.gate, &self.parts[..]) {
            (None, parts) => parts.iter().map(PackedLayout::rows).collect(),
            (Some(_), [both]) => vec![both.rows() / 2],
            (Some(_), parts) => vec![parts[0].rows()],
        }
    }

    /// Numbers that a row of activations makes.
    pub(crate) fn outputs(&self) -> usize {
        self.part_outputs().iter().sum()
    }
}

/// What changes the generated code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProductBlueprint {
    /// Units per cube.
    pub(crate) units: usize,
    /// Units that share a row: a power of two that divides the units.
    pub(crate) lanes: usize,
    /// Units per plane if they can exchange values, else 1. A team is within a plane then.
    pub(crate) plane: usize,
    /// Outputs of a unit.
    pub(crate) unit_rows: usize,
    /// Rows of activations of a cube: a power of two.
    pub(crate) x_rows: usize,
    /// Matrices.
    pub(crate) parts: usize,
    /// What the first half of the rows goes through.
    pub(crate) gate: Option<Gate>,
    /// Whether activations are normed.
    pub(crate) norm: bool,
    /// Whether the gains of the norm are stored less 1.
    pub(crate) plus_one: bool,
}

impl ProductBlueprint {
    /// Rows of weights of an output.
    pub(super) const fn width(&self) -> usize {
        if self.gate.is_some() { 2 } else { 1 }
    }

    /// Products of a unit: for every output its rows of weights, and for each of these the rows of activations.
    pub(super) const fn products(&self) -> usize {
        self.unit_rows * self.width() * self.x_rows
    }

    /// Sums of a unit: products, and with a norm the squares of the rows of activations.
    pub(super) const fn sums(&self) -> usize {
        self.products() + if self.norm { self.x_rows } else { 0 }
    }

    /// Entries of the shared array that sums are added up in.
    pub(super) const fn scratch_len(&self) -> usize {
        if self.plane > 1 || self.lanes == 1 { 1 } else { self.units * self.sums() }
    }

    /// Teams of a cube.
    pub(super) const fn teams(&self) -> usize {
        self.units / self.lanes
    }

    /// Outputs of a cube, for a row of activations.
    pub(super) const fn cube_rows(&self) -> usize {
        self.teams() * self.unit_rows
    }
}

/// The properties of a device that a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hardware {
    /// Units per plane if they can exchange values, else 1.
    pub(crate) plane: usize,
    /// Whether a plane is a vector of a processor's, such as Mesa's llvmpipe has. There a load of one address for all
    /// units costs what one of them does where they differ.
    pub(crate) vector: bool,
}

/// Most rows of activations that tiles are the faster way for on a GPU.
const MOST_TILED: usize = 256;

impl Hardware {
    pub(crate) fn of(properties: &DeviceProperties) -> Self {
        let hardware = &properties.hardware;
        let sizes = (hardware.plane_size_min, hardware.plane_size_max);
        // A plan needs to know the size of a plane; some devices choose it for each kernel.
        let known = sizes.0 == sizes.1 && properties.features.plane.contains(Plane::Ops);
        // No GPU has planes of fewer units than 16 only.
        Self { plane: if known { sizes.0 as usize } else { 1 }, vector: sizes.1 < 16 }
    }

    /// The fastest way for `n` rows of activations.
    ///
    /// Measured on llvmpipe of two threads: blocks are multiplied fastest by the product of few rows up to 512 (Q4_0
    /// `[1536, 576]` by 64: 20 ms, by tiles 27, restored 36; by 512: 150, 204, 170), f16, whose numbers take longer to
    /// widen than to multiply, by tiles (by 64: 56, 24, 27 ms; by 512: 411, 241, 232). For GPUs it is an estimate: the
    /// product of few rows reads a matrix once for each eight rows, tiles once for 64, and what Burn's product gains by
    /// its tuning pays for restoring only with more.
    pub(crate) const fn way(&self, n: usize, format: WeightFormat) -> Way {
        if n <= FEW || self.vector && !format.is_float() {
            Way::Few
        } else if n <= MOST_TILED || self.vector {
            Way::Tiles
        } else {
            Way::Restored
        }
    }
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By [this module](super)'s kernel.
    Few,
    /// By [tiles](crate::kernels::tiled).
    Tiles,
    /// By Burn's product with parts of the matrix that are restored before.
    Restored,
}

/// Plans a launch.
///
/// Neighbors in a plane of a GPU share rows, so that they read neighboring blocks. Those of a vector have rows each, and
/// read the same activations; more sums for each load of these are worth spilled registers there. Measured on llvmpipe
/// of two threads, Q4_1 `[3072, 576]` by one row: 1.3 ms with rows shared by eight units, 0.6 with none shared.
pub(super) fn prepare(problem: &ProductProblem, hardware: Hardware) -> ProductBlueprint {
    let spans = problem.parts[0].columns() / SPAN;
    let (most_lanes, most_x_rows, most_rows, most_sums) = match hardware {
        Hardware { vector: true, .. } => (1, 4, 4, 16),
        Hardware { plane: 1, .. } => (16, 8, 2, 8),
        Hardware { plane, .. } => (plane, 8, 2, 8),
    };
    // As many lanes as a row gives work to.
    let mut lanes = 1;
    while 2 * lanes <= most_lanes && 2 * lanes <= spans {
        lanes *= 2;
    }
    let width = if problem.gate.is_some() { 2 } else { 1 };
    let x_rows = problem.n.next_power_of_two().min(most_x_rows);
    ProductBlueprint {
        units: if hardware.vector { 32 } else { 64.max(hardware.plane) },
        lanes,
        plane: hardware.plane,
        unit_rows: (most_sums / width / x_rows).clamp(1, most_rows),
        x_rows,
        parts: problem.parts.len(),
        gate: problem.gate,
        norm: problem.norm,
        plus_one: problem.plus_one,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every plan, on every kind of device, is within WebGPU's limits, and its parts divide.
    #[test]
    fn plans_fit() {
        for (plane, vector) in
            [(1, true), (8, true), (1, false), (16, false), (32, false), (64, false)]
        {
            for (n, columns) in (1..=70).flat_map(|n| [32, 576, 4096].map(|columns| (n, columns))) {
                for (gate, norm) in [(None, false), (Some(Gate::Silu), true)] {
                    let part = PackedLayout::new(WeightFormat::Q4_0, [262_144, columns]).unwrap();
                    let problem = ProductProblem {
                        n,
                        parts: vec![part],
                        gate,
                        norm,
                        epsilon: 1e-5,
                        plus_one: false,
                    };
                    let bp = prepare(&problem, Hardware { plane, vector });
                    assert!(bp.units <= 256 && 4 * bp.scratch_len() <= 16 * 1024, "{bp:?}");
                    assert!(bp.units.is_multiple_of(bp.lanes) && bp.lanes.is_power_of_two());
                    assert!(bp.plane == 1 || bp.plane.is_multiple_of(bp.lanes), "{bp:?}");
                    assert!(bp.x_rows * n.div_ceil(bp.x_rows) >= n);
                }
            }
        }
    }
}
