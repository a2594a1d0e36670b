use cubecl::{features::Plane, ir::DeviceProperties};

use crate::{Gate, PackedLayout, WeightFormat, formats::cube::SPAN, fused::FEW};

/// `n` rows of activations times the rows of matrices of one format and width.
#[derive(Clone, Debug)]
pub(crate) struct ProductProblem {
    /// Rows of activations.
    pub(crate) n: usize,
    /// One to three stacked matrices. With a gate, one or two of equal size.
    pub(crate) parts: Vec<PackedLayout>,
    /// Applied to the first half of the rows before it is multiplied with the second.
    pub(crate) gate: Option<Gate>,
    /// True if activations are normalized.
    pub(crate) norm: bool,
    /// Added to the mean of squares in the norm.
    pub(crate) epsilon: f32,
    /// True if 1 is added to the gains of the norm.
    pub(crate) plus_one: bool,
}

impl ProductProblem {
    /// Creates the problem of a product with one matrix and nothing fused.
    pub(crate) fn plain(n: usize, layout: PackedLayout) -> Self {
        let parts = vec![layout];
        Self { n, parts, gate: None, norm: false, epsilon: 0.0, plus_one: false }
    }

    /// Returns the number of outputs of each part.
    pub(super) fn part_outputs(&self) -> Vec<usize> {
        match (self.gate, &self.parts[..]) {
            (None, parts) => parts.iter().map(PackedLayout::rows).collect(),
            (Some(_), [both]) => vec![both.rows() / 2],
            (Some(_), parts) => vec![parts[0].rows()],
        }
    }

    /// Returns the number of outputs per row of activations.
    pub(crate) fn outputs(&self) -> usize {
        self.part_outputs().iter().sum()
    }
}

/// Parameters that change the generated code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProductBlueprint {
    /// Units per cube.
    pub(crate) units: usize,
    /// Units that share a row, called a team: a power of two that divides `units`.
    pub(crate) lanes: usize,
    /// Units per plane if they can exchange values, otherwise 1. A team is then within a plane.
    pub(crate) plane: usize,
    /// Outputs per unit.
    pub(crate) unit_rows: usize,
    /// Rows of activations per cube, a power of two.
    pub(crate) x_rows: usize,
    pub(crate) parts: usize,
    pub(crate) gate: Option<Gate>,
    /// True if activations are normalized.
    pub(crate) norm: bool,
    /// True if 1 is added to the gains of the norm.
    pub(crate) plus_one: bool,
}

impl ProductBlueprint {
    /// Returns the number of rows of weights per output.
    pub(super) const fn width(&self) -> usize {
        if self.gate.is_some() { 2 } else { 1 }
    }

    /// Returns the number of products per unit: one for each output, row of weights of the output
    /// and row of activations.
    pub(super) const fn products(&self) -> usize {
        self.unit_rows * self.width() * self.x_rows
    }

    /// Returns the number of sums per unit: the products and, with a norm, the squares of the rows
    /// of activations.
    pub(super) const fn sums(&self) -> usize {
        self.products() + if self.norm { self.x_rows } else { 0 }
    }

    /// Returns the length of the shared array used for sums over a team.
    pub(super) const fn scratch_len(&self) -> usize {
        if self.plane > 1 || self.lanes == 1 { 1 } else { self.units * self.sums() }
    }

    pub(super) const fn teams(&self) -> usize {
        self.units / self.lanes
    }

    /// Returns the number of outputs of a cube per row of activations.
    pub(super) const fn cube_rows(&self) -> usize {
        self.teams() * self.unit_rows
    }
}

/// Properties of a device that a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hardware {
    /// Units per plane if they can exchange values, otherwise 1.
    pub(crate) plane: usize,
    /// True if a plane is a vector of a CPU, as in Mesa's llvmpipe. There, one load serves all
    /// units that read the same address, while different addresses take a load each.
    pub(crate) vector: bool,
}

/// The most rows of activations for which tiles are the fastest way on a GPU.
const MOST_TILED: usize = 256;

impl Hardware {
    pub(crate) fn of(properties: &DeviceProperties) -> Self {
        let hardware = &properties.hardware;
        let sizes = (hardware.plane_size_min, hardware.plane_size_max);
        // A plan needs to know the plane size, which some devices choose per kernel.
        let known = sizes.0 == sizes.1 && properties.features.plane.contains(Plane::Ops);
        // Every GPU supports planes of at least 16 units.
        Self { plane: if known { sizes.0 as usize } else { 1 }, vector: sizes.1 < 16 }
    }

    /// Returns the fastest way for `n` rows of activations.
    ///
    /// Measured on llvmpipe with two threads, in ms. Q4_0 `[1536, 576]` by 64 rows: few rows 20,
    /// tiles 27, restored 36; by 512 rows: 150, 204, 170. f16, which is slower to widen than to
    /// multiply, by 64 rows: 56, 24, 27; by 512 rows: 411, 241, 232. For GPUs, the thresholds are
    /// estimates: the product of few rows reads a matrix once per eight rows, tiles read it once
    /// per 64, and only with more rows does Burn's tuned matmul make up for restoring.
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

/// The way a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The kernel of [this module](super).
    Few,
    /// [Tiles](crate::kernels::tiled) in shared memory.
    Tiles,
    /// Burn's matmul with restored parts of the matrix.
    Restored,
}

/// Plans a launch.
///
/// In a plane of a GPU, neighboring units share rows, so that they read neighboring blocks. In a
/// vector of a CPU, each unit has its own rows, and all read the same activations. There, more sums
/// per load of activations pay off even if registers are spilled. Measured on llvmpipe with two
/// threads, Q4_1 `[3072, 576]` by one row: 1.3 ms with rows shared by eight units, 0.6 ms without
/// sharing.
pub(super) fn prepare(problem: &ProductProblem, hardware: Hardware) -> ProductBlueprint {
    let spans = problem.parts[0].columns() / SPAN;
    let (most_lanes, most_x_rows, most_rows, most_sums) = match hardware {
        Hardware { vector: true, .. } => (1, 4, 4, 16),
        Hardware { plane: 1, .. } => (16, 8, 2, 8),
        Hardware { plane, .. } => (plane, 8, 2, 8),
    };
    // The largest power of two for which each lane has a span.
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

    /// Checks every plan on every kind of device against WebGPU's limits, and that its parts
    /// divide.
    #[test]
    fn plans_are_within_limits() {
        for (plane, vector) in
            [(1, true), (8, true), (1, false), (16, false), (32, false), (64, false)]
        {
            for (n, columns) in (1..=70).flat_map(|n| [32, 576, 4096].map(|columns| (n, columns))) {
                for (gate, norm) in [(None, false), (Some(Gate::Silu), true)] {
                    let part = PackedLayout::new(WeightFormat::Q4_0, [262_144, columns]).unwrap();
                    let problem = ProductProblem { gate, norm, ..ProductProblem::plain(n, part) };
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
