//! The memory that a program may take.

use std::{
    fs,
    path::{Path, PathBuf},
    str::FromStr,
};

use burn::tensor::Device;
use kv_cubecl::DeviceMemory;
use kv_models::MemoryLimit;

/// Bytes, as `8G` or `512MiB`: a number without a unit could be gigabytes as well as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySize(pub u64);

impl FromStr for MemorySize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rule = || format!("{text:?} is no size such as 8G, 512M or 1.5GiB");
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let number: f64 = text[..digits].parse().map_err(|_| rule())?;
        let unit = match text[digits..].trim().to_ascii_lowercase().as_str() {
            "" => {
                return Err(format!("{text:?} has no unit: {text}G are gigabytes, {text}B bytes"));
            }
            "b" => 1.0,
            "k" | "kb" => 1e3,
            "m" | "mb" => 1e6,
            "g" | "gb" => 1e9,
            "t" | "tb" => 1e12,
            "kib" => 1024.0,
            "mib" => f64::from(1 << 20),
            "gib" => f64::from(1 << 30),
            "tib" => 1024.0 * f64::from(1 << 30),
            _ => return Err(rule()),
        };
        match number * unit {
            bytes if bytes >= 1.0 && bytes < u64::MAX as f64 => Ok(Self(bytes as u64)),
            _ => Err(rule()),
        }
    }
}

/// Returns the memory that `device` may take: `asked` (from `--memory`), else the device's own,
/// else the free memory of this machine, as far as it is known.
pub fn memory_limit(asked: Option<MemorySize>, device: &Device) -> MemoryLimit {
    let of_device = DeviceMemory::of(device);
    let limit = match (asked, of_device.total) {
        (Some(MemorySize(bytes)), _) => MemoryLimit::new(Some(bytes), "--memory"),
        (None, Some(bytes)) => MemoryLimit::new(Some(bytes), "the device's memory"),
        // The memory of another machine, which burn-remote does not tell.
        (None, None) if kv_device::is_remote(device) => {
            MemoryLimit::new(None, "the worker's memory")
        }
        (None, None) => free(Path::new("/")),
    };
    limit.with_buffer(of_device.buffer)
}

/// Returns the free memory of this machine, read from files below `root`. On Linux it is the least
/// of the memory available without swapping, the rest of the control groups' limits and the rest of
/// `ulimit -v`.
fn free(root: &Path) -> MemoryLimit {
    let machine = fs::read_to_string(root.join("proc/meminfo")).ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    });
    let groups = groups(root).into_iter().filter_map(|group| group.left()).min();
    let limits = [
        (machine, "MemAvailable"),
        (groups, "the control group's limit"),
        (addresses(root), "the limit of ulimit -v"),
    ];
    let known = limits.into_iter().filter_map(|(bytes, source)| Some((bytes?, source)));
    match known.min_by_key(|(bytes, _)| *bytes) {
        Some((bytes, source)) => MemoryLimit::new(Some(bytes), source),
        None => MemoryLimit::new(None, "MemAvailable"),
    }
}

/// Returns the bytes left of this program's address space limit, if there is one.
fn addresses(root: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(root.join("proc/self").join(name)).ok();
    let (limits, status) = (read("limits")?, read("status")?);
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = limit.split_whitespace().next()?.parse().ok()?;
    let used = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    let used: u64 = used.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(limit.saturating_sub(used * 1024))
}

/// The folder of a control group, and the names of its files.
struct Group {
    folder: PathBuf,
    limit: &'static str,
    used: &'static str,
}

impl Group {
    /// Bytes that it may still allocate. Cached files do not count as taken, because the kernel
    /// drops them.
    fn left(&self) -> Option<u64> {
        let read = |name: &str| fs::read_to_string(self.folder.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        // Without a limit, the file holds `max`, or in version 1 a number beyond all memory.
        let limit = number(self.limit)?;
        let files = read("memory.stat").map_or(0, |text| {
            let of = |line: &str| {
                let (name, bytes) = line.split_once(' ')?;
                let counted = ["active_file", "inactive_file"].contains(&name);
                bytes.trim().parse::<u64>().ok().filter(|_| counted)
            };
            text.lines().filter_map(of).sum()
        });
        Some(limit.saturating_sub(number(self.used)?.saturating_sub(files)))
    }
}

/// Lists the control groups of this program, of both versions.
fn groups(root: &Path) -> Vec<Group> {
    let Ok(text) = fs::read_to_string(root.join("proc/self/cgroup")) else { return vec![] };
    let mut groups = vec![];
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) =
            (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let (base, limit, used) = match (number, controllers) {
            ("0", "") => ("sys/fs/cgroup", "memory.max", "memory.current"),
            (_, "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let base = root.join(base);
        // In a container, the mount may be the group itself, with its path outside.
        let mut at = Some(Path::new(path.trim_start_matches('/')));
        while let Some(below) = at {
            groups.push(Group { folder: base.join(below), limit, used });
            at = below.parent();
        }
    }
    groups
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failing test may panic")]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in [
            ("8G", 8_000_000_000),
            ("512MiB", 512 << 20),
            ("1.5gb", 1_500_000_000),
            ("4096B", 4096),
        ] {
            assert_eq!(text.parse(), Ok(MemorySize(bytes)), "{text}");
        }
        let error = "16".parse::<MemorySize>().unwrap_err();
        assert_eq!(error, "\"16\" has no unit: 16G are gigabytes, 16B bytes");
        for text in ["", "G", "4096", "-1G", "0", "8 X", "1e400", "1.2.3M", "NaN"] {
            assert!(text.parse::<MemorySize>().is_err(), "{text}");
        }
    }

    fn machine(files: &[(&str, &str)]) -> MemoryLimit {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        free(root.path())
    }

    #[test]
    fn the_smallest_limit_counts() {
        let meminfo = ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n");
        let limit = machine(&[meminfo]);
        assert_eq!((limit.total, &*limit.source), (Some(4_096_000), "MemAvailable"));
        let of_group = |max: &str| {
            machine(&[
                meminfo,
                ("proc/self/cgroup", "0::/a/b\n"),
                ("sys/fs/cgroup/a/b/memory.max", "max\n"),
                ("sys/fs/cgroup/a/b/memory.current", "100\n"),
                ("sys/fs/cgroup/a/memory.max", max),
                ("sys/fs/cgroup/a/memory.current", "900000\n"),
                (
                    "sys/fs/cgroup/a/memory.stat",
                    "anon 1\nactive_file 300000\ninactive_file 100000\n",
                ),
            ])
        };
        let limit = of_group("1000000\n");
        assert_eq!((limit.total, &*limit.source), (Some(500_000), "the control group's limit"));
        assert_eq!(of_group("9000000\n").total, Some(4_096_000));
        // The first version, in a container that shows its own group as the root.
        let limit = machine(&[
            meminfo,
            ("proc/self/cgroup", "4:memory:/docker/x\n3:cpu:/docker/x\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n"),
        ]);
        assert_eq!(limit.total, Some(1_500_000));
        assert_eq!(machine(&[]).total, None);
        // A limit of the program's own.
        let of_shell = |limit: &str| {
            let limits = format!("Max address space         {limit}    unlimited     bytes\n");
            let status = ("proc/self/status", "Name: x\nVmSize:\t    1000 kB\n");
            machine(&[meminfo, ("proc/self/limits", &limits), status])
        };
        let limit = of_shell("3024000");
        assert_eq!((limit.total, &*limit.source), (Some(2_000_000), "the limit of ulimit -v"));
        assert_eq!(of_shell("unlimited").total, Some(4_096_000));
    }
}
