use cubecl::{features::Plane, ir::DeviceProperties};

use crate::{Gate, PackedLayout, formats::cube::SPAN};

/// Most rows of activations that a cube takes.
pub(crate) const MOST_ROWS: usize = 8;
/// Most sums that a unit keeps.
const MOST_SUMS: usize = 8;

/// `n` rows of activations by the rows of matrices of one format and width.
#[derive(Clone, Debug)]
pub(crate) struct ProductProblem {
    /// Rows of activations.
    pub(crate) n: usize,
    /// One to three matrices whose rows follow one another; with a gate, one or two of equal size.
    pub(crate) parts: Vec<PackedLayout>,
    /// What the first half of the rows goes through before it is multiplied with the second.
    pub(crate) gate: Option<Gate>,
    /// What is added to the mean of squares of the norm.
    pub(crate) epsilon: f32,
    /// Whether the gains of the norm are stored less 1.
    pub(crate) plus_one: bool,
}

impl ProductProblem {
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
    /// Units per plane if they can exchange values and a team is within a plane, else 1.
    pub(crate) plane: usize,
    /// Outputs of a unit.
    pub(crate) unit_rows: usize,
    /// Rows of activations of a cube: a power of two.
    pub(crate) x_rows: usize,
    /// Matrices.
    pub(crate) parts: usize,
    /// What the first half of the rows goes through.
    pub(crate) gate: Option<Gate>,
    /// Whether the gains of the norm are stored less 1.
    pub(crate) plus_one: bool,
}

impl ProductBlueprint {
    /// Rows of weights of an output.
    pub(super) const fn width(&self) -> usize {
        if self.gate.is_some() { 2 } else { 1 }
    }

    /// Sums of a unit: for every output its rows of weights, and for each of these the rows of activations.
    pub(super) const fn sums(&self) -> usize {
        self.unit_rows * self.width() * self.x_rows
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
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hardware {
    /// Units per plane if they can exchange values, else 1.
    pub(crate) plane: usize,
}

impl Hardware {
    pub(crate) fn of(properties: &DeviceProperties) -> Self {
        let hardware = &properties.hardware;
        let sizes = (hardware.plane_size_min, hardware.plane_size_max);
        // A plan needs to know the size of a plane; some devices choose it for each kernel.
        let known = sizes.0 == sizes.1 && properties.features.plane.contains(Plane::Ops);
        Self { plane: if known { sizes.0 as usize } else { 1 } }
    }
}

/// Plans a launch.
pub(super) fn prepare(problem: &ProductProblem, hardware: Hardware) -> ProductBlueprint {
    let spans = problem.parts[0].columns() / SPAN;
    let width = if problem.gate.is_some() { 2 } else { 1 };
    let x_rows = problem.n.next_power_of_two().min(MOST_ROWS);
    // As many lanes as a row gives work to.
    let mut lanes = 1;
    while 2 * lanes <= hardware.plane.max(16) && 2 * lanes <= spans {
        lanes *= 2;
    }
    let plane = if lanes <= hardware.plane { hardware.plane } else { 1 };
    ProductBlueprint {
        units: 64.max(plane),
        lanes,
        plane,
        unit_rows: (MOST_SUMS / width / x_rows).clamp(1, 2),
        x_rows,
        parts: problem.parts.len(),
        gate: problem.gate,
        plus_one: problem.plus_one,
    }
}
