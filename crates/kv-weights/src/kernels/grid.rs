//! Number of cubes and index width of a launch, planned on the host within the limits of the
//! device.

use cubecl::{
    ir::{AddressType, DeviceProperties},
    prelude::*,
};

use crate::{Error, Result};

/// The cubes of a launch, spread over as many axes as needed. Kernels use `CUBE_POS`, and a few
/// cubes may have no work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    counts: [u32; 3],
    /// Units per cube.
    units: usize,
    /// Type of the indices in the kernel.
    pub(crate) address: AddressType,
}

impl Grid {
    /// Plans at least `cubes` cubes of `units` units for the operation `what`. `most` is the
    /// largest count of units, elements or bytes that the kernel indexes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has too few cubes or too narrow indices.
    pub(crate) fn new(
        what: &str,
        cubes: usize,
        units: usize,
        most: usize,
        properties: &DeviceProperties,
    ) -> Result<Self> {
        let (x, y, z) = properties.hardware.max_cube_count;
        let wide = properties.supports_address(AddressType::U64);
        Self::within(what, cubes, units, most, ([x, y, z].map(|count| count as usize), wide))
    }

    fn within(
        what: &str,
        cubes: usize,
        units: usize,
        most: usize,
        (max_cubes, wide): ([usize; 3], bool),
    ) -> Result<Self> {
        let unsupported = |why: String| Error::Unsupported {
            what: format!("{what} of a matrix of this size"),
            why,
        };
        let counts = spread(cubes.max(1), max_cubes).ok_or_else(|| {
            unsupported(format!("it needs {cubes} cubes, but the device has {max_cubes:?}"))
        })?;
        let all_units = counts.into_iter().fold(units, usize::saturating_mul);
        let address = AddressType::from_len(most.max(all_units));
        if address == AddressType::U64 && !wide {
            return Err(unsupported(format!("the device counts up to {}", u32::MAX)));
        }
        // The counts fit: the limits of the device are u32.
        Ok(Self { counts: counts.map(|count| count as u32), units, address })
    }

    pub(crate) fn count(&self) -> CubeCount {
        let [x, y, z] = self.counts;
        CubeCount::Static(x, y, z)
    }

    pub(crate) fn dim(&self) -> CubeDim {
        CubeDim::new_1d(self.units as u32)
    }
}

/// Spreads slightly more than `total` cubes over axes of at most `most` each. Returns `None` if
/// that is impossible.
fn spread(total: usize, most: [usize; 3]) -> Option<[usize; 3]> {
    let rows = total.div_ceil(most[0]);
    let layers = rows.div_ceil(most[1]);
    if layers > most[2] {
        return None;
    }
    let rows = rows.div_ceil(layers);
    Some([total.div_ceil(rows * layers), rows, layers])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limits that WebGPU guarantees.
    const WEBGPU: ([usize; 3], bool) = ([65_535; 3], false);

    #[test]
    fn many_cubes_spread_over_several_axes() {
        for total in [1, 65_535, 65_536, 65_537, 1 << 20, 5_000_000_011] {
            let [x, y, z] = spread(total, WEBGPU.0).unwrap();
            assert!([x, y, z].iter().all(|&count| count <= 65_535), "{total}");
            assert!(x * y * z >= total && x * y * z - total < x + y * z, "{total}");
        }
        assert!(spread(9, [2, 2, 2]).is_none());
        // A vocabulary of 262144 with one cube per row.
        let grid = Grid::within("project", 262_144, 64, 1 << 30, WEBGPU).unwrap();
        assert_eq!((grid.counts, grid.address), ([52_429, 5, 1], AddressType::U32));
    }

    #[test]
    fn indices_are_as_wide_as_needed_or_rejected() {
        let large = (1 << 32) + 4096;
        let cuda = ([i32::MAX as usize, 65_535, 65_535], true);
        let grid = Grid::within("project", 1 << 20, 64, large, cuda).unwrap();
        assert_eq!(grid.address, AddressType::U64);
        let message = Grid::within("project", 1 << 20, 64, large, WEBGPU).unwrap_err().to_string();
        assert!(message.contains("the device counts up to 4294967295"), "{message}");
        let message = Grid::within("lookup", 9, 1, 9, ([2; 3], true)).unwrap_err().to_string();
        assert!(message.contains("it needs 9 cubes, but the device has [2, 2, 2]"), "{message}");
    }
}
