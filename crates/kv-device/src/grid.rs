//! The number of cubes of a launch along each axis and the width of its indices, planned on the
//! host within the limits of the device.

#![allow(
    missing_docs,
    missing_debug_implementations,
    reason = "CubeType derives a public type with neither"
)]

use cubecl::{
    ir::{AddressType, DeviceProperties},
    prelude::*,
};

use crate::Unsupported;

/// Units per cube of the element-wise kernels.
pub const ELEMENTWISE_UNITS: usize = 128;

/// Limits of a device on a launch.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most cubes along each axis; WebGPU guarantees 65535.
    max_cubes: [usize; 3],
    /// True if indices may have 64 bits, which WGSL lacks.
    wide: bool,
}

impl Limits {
    /// The limits that WebGPU guarantees.
    pub const WEBGPU: Self = Self { max_cubes: [65_535; 3], wide: false };

    /// Returns the limits of a device.
    pub fn of(properties: &DeviceProperties) -> Self {
        let (x, y, z) = properties.hardware.max_cube_count;
        let max_cubes = [x, y, z].map(|count| count as usize);
        Self { max_cubes, wide: properties.supports_address(AddressType::U64) }
    }
}

/// The cubes of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    counts: [u32; 3],
    /// Units per cube.
    units: usize,
    /// True if the cubes exceed the limit of one axis and are spread over all three. Some cubes may
    /// then have no work, and kernels compute their index by [`fn@cube_at`].
    pub flat: bool,
    /// Type of the kernel's indices.
    pub address: AddressType,
}

impl Grid {
    /// A grid of `wanted` cubes along each axis, of `units` each, for the operation `what`, whose
    /// longest buffer has `elements`.
    ///
    /// # Errors
    /// [`Unsupported`] where the device has too few cubes or too short indices.
    pub fn new(
        what: &str,
        wanted: [usize; 3],
        units: usize,
        elements: usize,
        limits: &Limits,
    ) -> Result<Self, Unsupported> {
        let unsupported = |why: String| Unsupported {
            what: format!("{what} of {elements} elements in one buffer"),
            why,
        };
        let fits = wanted.iter().zip(limits.max_cubes).all(|(&wanted, most)| wanted <= most);
        let counts = match fits {
            true => wanted,
            false => {
                let total = wanted.into_iter().fold(1usize, usize::saturating_mul);
                let most = limits.max_cubes;
                spread(total, most).ok_or_else(|| {
                    unsupported(format!("it takes {total} cubes, and the device has {most:?}"))
                })?
            }
        };
        let all_units = counts.into_iter().fold(units, usize::saturating_mul);
        let address = AddressType::from_len(elements.max(all_units));
        if address == AddressType::U64 && !limits.wide {
            return Err(unsupported(format!("the device counts up to {}", u32::MAX)));
        }
        // The counts fit: they are at most what the device allows, which is a u32.
        Ok(Self { counts: counts.map(|count| count as u32), units, flat: !fits, address })
    }

    /// A grid of at least `n` units, one for each piece of work.
    ///
    /// # Errors
    /// Fails as [`new`](Self::new) does.
    pub fn elementwise(
        what: &str,
        n: usize,
        elements: usize,
        limits: &Limits,
    ) -> Result<Self, Unsupported> {
        let cubes = n.div_ceil(ELEMENTWISE_UNITS).max(1);
        Self::new(what, [cubes, 1, 1], ELEMENTWISE_UNITS, elements, limits)
    }

    /// Returns the number of cubes along each axis.
    pub fn count(&self) -> CubeCount {
        let [x, y, z] = self.counts;
        CubeCount::Static(x, y, z)
    }

    /// Returns the units of a cube.
    pub fn dim(&self) -> CubeDim {
        CubeDim::new_1d(self.units as u32)
    }
}

/// At least `total` cubes, few more, and at most `most` along each axis; `None` if that is
/// impossible.
fn spread(total: usize, most: [usize; 3]) -> Option<[usize; 3]> {
    let rows = total.div_ceil(most[0]);
    let layers = rows.div_ceil(most[1]);
    if layers > most[2] {
        return None;
    }
    let rows = rows.div_ceil(layers);
    Some([total.div_ceil(rows * layers), rows, layers])
}

/// Position of a cube in a planned grid, whether spread over the axes or not.
#[derive(CubeType)]
pub struct CubePosition {
    pub x: usize,
    pub y: usize,
    /// At or beyond the planned grid's end in cubes that have no work.
    pub z: usize,
}

/// Position of this cube in a planned grid of `x` times `y` times any number of cubes; `flat` is
/// [`Grid::flat`].
#[cube]
pub fn cube_at(x: usize, y: usize, #[comptime] flat: bool) -> CubePosition {
    if comptime!(flat) {
        CubePosition { x: CUBE_POS % x, y: CUBE_POS / x % y, z: CUBE_POS / x / y }
    } else {
        CubePosition { x: CUBE_POS_X as usize, y: CUBE_POS_Y as usize, z: CUBE_POS_Z as usize }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEBGPU: Limits = Limits::WEBGPU;
    const CUDA: Limits = Limits { max_cubes: [i32::MAX as usize, 65_535, 65_535], wide: true };

    #[test]
    fn spreading_covers_all_and_little_more() {
        for most in [[65_535; 3], [7, 5, 3], [1000, 2, 65_535], [i32::MAX as usize, 65_535, 65_535]]
        {
            for total in (1..200).chain([65_535, 65_536, 65_537, 1 << 20, (1 << 32) + 17, 1 << 40])
            {
                let Some([x, y, z]) = spread(total, most) else {
                    assert!(total > most.iter().product(), "{total} fit {most:?}");
                    continue;
                };
                assert!(x <= most[0] && y <= most[1] && z <= most[2], "{total} {most:?}");
                let all = x * y * z;
                assert!(all >= total && all - total < y * z + x, "{total} {most:?}: {all}");
            }
        }
    }

    #[test]
    fn what_fits_stays_in_its_order() {
        let grid = Grid::new("test", [8, 16, 300], 64, 1 << 30, &WEBGPU).unwrap();
        assert_eq!((grid.counts, grid.flat, grid.address), ([8, 16, 300], false, AddressType::U32));
    }

    #[test]
    fn long_axes_go_over_the_others() {
        // Backward of 2^19 tokens, 4 keys per cube, and 4 slices.
        let grid = Grid::new("test", [1 << 17, 4, 1], 64, 1 << 30, &WEBGPU).unwrap();
        assert!(grid.flat && grid.counts.iter().all(|&count| count <= 65_535));
        assert!(grid.counts.iter().map(|&count| count as usize).product::<usize>() >= 1 << 19);
    }

    #[test]
    fn indices_are_as_wide_as_needed_or_refused() {
        let elements = (1 << 32) + 4096;
        let grid = Grid::elementwise("test", elements, elements, &CUDA).unwrap();
        assert_eq!(grid.address, AddressType::U64);
        assert_eq!(grid.counts, [(elements / ELEMENTWISE_UNITS) as u32, 1, 1]);
        let message = Grid::elementwise("quantize", elements, elements, &WEBGPU).unwrap_err();
        let message = message.to_string();
        assert!(message.contains("quantize of 4294971392 elements"), "{message}");
        assert!(message.contains("the device counts up to 4294967295"), "{message}");
        // A buffer too long for u32 with few units is refused. So are 2^32 units, whose index would
        // wrap around.
        assert!(Grid::elementwise("test", 1, elements, &WEBGPU).is_err());
        let last = u32::MAX as usize;
        assert!(Grid::elementwise("test", last - 200_000_000, last, &WEBGPU).is_ok());
        assert!(Grid::new("test", [1 << 25, 1, 1], 128, last, &WEBGPU).is_err());
        let most = Limits { max_cubes: [2, 2, 2], wide: true };
        let message = Grid::new("test", [9, 1, 1], 1, 9, &most).unwrap_err().to_string();
        assert!(message.contains("it takes 9 cubes"), "{message}");
    }
}
