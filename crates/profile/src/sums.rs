//! Totals, counts, means and shares.

use std::collections::{BTreeMap, HashMap};

use kv_models::spans::REPLAY;
use kv_report::{
    Table,
    timeline::{Bar, Kind},
};

use crate::{
    label::{Labels, OUTSIDE, PASSES},
    launch::{Launch, Launches},
    log::{Amounts, PhaseGroup, Sum, ThreadLog},
};

/// Maximum rows of a table; one more row sums up the rest.
const MOST_ROWS: usize = 40;

pub(crate) struct Sums<'a> {
    labels: &'a Labels,
    /// Nanoseconds of the whole run.
    wall: u64,
    /// Bytes that the device copies in a second.
    copy_rate: Option<f64>,
    host: BTreeMap<PhaseGroup, Sum>,
    device: HashMap<PhaseGroup, Sum>,
    /// The part of `device` in launched steps, in nanoseconds.
    steps: BTreeMap<PhaseGroup, u64>,
    launches: &'a Launches,
}

/// Times of one thing, in nanoseconds.
#[derive(Clone, Copy, Default)]
struct Times {
    count: u64,
    total: u64,
    bytes: u64,
}

impl Times {
    fn add(&mut self, nanoseconds: u64) {
        self.count += 1;
        self.total += nanoseconds;
    }

    /// Formats count, total in ms, mean in us and share.
    fn cells(self, of: u64) -> [String; 4] {
        let Self { count, total, .. } = self;
        let mean = total as f64 / 1e3 / count.max(1) as f64;
        [count.to_string(), ms(total), format!("{mean:.1}"), share(total, of)]
    }
}

fn ms(nanoseconds: u64) -> String {
    format!("{:.3}", nanoseconds as f64 / 1e6)
}

fn share(part: u64, of: u64) -> String {
    format!("{:.1}%", 100.0 * part as f64 / of.max(1) as f64)
}

impl<'a> Sums<'a> {
    pub(crate) fn new(
        labels: &'a Labels,
        logs: &[&ThreadLog],
        launches: &'a Launches,
        (wall, copy_rate): (u64, Option<f64>),
    ) -> Self {
        let mut host: BTreeMap<PhaseGroup, Sum> = BTreeMap::new();
        for (&place, sum) in logs.iter().flat_map(|log| &log.sums) {
            let all = host.entry(place).or_default();
            all.count += sum.count;
            all.own += sum.own;
            all.whole += sum.whole;
            all.amounts.add(sum.amounts);
        }
        let mut device: HashMap<PhaseGroup, Sum> = HashMap::new();
        let mut steps = BTreeMap::new();
        for launch in launches.queues.iter().flat_map(|queue| &queue.launches) {
            let sum = device.entry(launch.place).or_default();
            sum.count += 1;
            let time = launch.end.saturating_sub(launch.start);
            sum.own += time;
            if launch.in_step {
                *steps.entry(launch.place).or_default() += time;
            }
        }
        Self { labels, wall, copy_rate, host, device, steps, launches }
    }

    /// Returns every table with its heading.
    pub(crate) fn tables(&self, logs: &[&ThreadLog]) -> Vec<(String, Table)> {
        let mut tables = vec![("Phases".to_string(), self.phases())];
        for phase in self.by_time() {
            let table = self.operations(phase);
            // More than the phase itself and the total.
            if table.rows().len() > 2 {
                let name = &self.labels.group_names[phase as usize];
                tables.push((format!("Operations in {name}"), table));
                tables.extend(self.replays(phase).map(|it| (format!("Replays in {name}"), it)));
            }
        }
        if !self.launches.queues.is_empty() {
            tables.push(("Kernels".into(), self.kernels()));
            tables.push(("Gaps between launches".into(), self.idle(logs)));
        }
        tables
    }

    /// Lists the phases in descending order of time.
    fn by_time(&self) -> Vec<u32> {
        let places = self.host.keys().chain(self.device.keys());
        let mut phases: Vec<u32> = places.map(|&(phase, _)| phase).collect();
        phases.sort_unstable();
        phases.dedup();
        let own = |phase: u32| -> u64 {
            self.host.range((phase, 0)..=(phase, u32::MAX)).map(|(_, sum)| sum.own).sum()
        };
        phases.sort_by_key(|&phase| std::cmp::Reverse(own(phase)));
        phases
    }

    /// Returns the nanoseconds that the device was busy with launches of one phase or of all.
    fn busy(&self, phase: Option<u32>) -> u64 {
        let of = |place: &PhaseGroup| phase.is_none_or(|phase| place.0 == phase);
        self.device.iter().filter(|(place, _)| of(place)).map(|(_, sum)| sum.own).sum()
    }

    /// Returns the sums of a phase over some groups, or over all.
    fn of_phase(&self, phase: u32, groups: Option<&[&str]>) -> Sum {
        let mut all = Sum::default();
        for (&(_, group), sum) in self.host.range((phase, 0)..=(phase, u32::MAX)) {
            let name = &*self.labels.group_names[group as usize];
            if groups.is_none_or(|groups| groups.contains(&name)) {
                all.whole += sum.whole;
                all.amounts.add(sum.amounts);
            }
        }
        all
    }

    /// Formats the tokens of a phase, its rate, and the time and the rate of its forward passes. A
    /// device computes them later than the host, so there the time that it is busy counts instead.
    fn rates(&self, phase: u32, whole: u64) -> [String; 4] {
        let Amounts { tokens, .. } = self.of_phase(phase, None).amounts;
        let forward = match self.launches.queues.is_empty() {
            true => self.of_phase(phase, Some(&[PASSES, "head", REPLAY])).whole,
            false => self.busy(Some(phase)),
        };
        let rate = |of: u64| match of {
            0 => String::new(),
            of => format!("{:.1}", tokens as f64 / of as f64 * 1e9),
        };
        match tokens {
            0 => [""; 4].map(String::from),
            tokens => [tokens.to_string(), rate(whole), ms(forward), rate(forward)],
        }
    }

    fn phases(&self) -> Table {
        let with_device = !self.launches.queues.is_empty();
        let mut header = vec!["phase", "count", "total ms", "mean us", "share of run"];
        header.extend(["tokens", "tokens/s", "forward ms", "forward tokens/s"]);
        if with_device {
            header.extend(["device busy ms", "device busy"]);
        }
        let mut table = Table::new(header);
        let mut covered = 0;
        for phase in self.by_time() {
            let Some(sum) = self.host.get(&(phase, phase)) else { continue };
            covered += sum.whole;
            let times = Times { count: sum.count, total: sum.whole, bytes: 0 };
            let mut row = vec![self.labels.group_names[phase as usize].clone()];
            row.extend(times.cells(self.wall));
            row.extend(self.rates(phase, sum.whole));
            if with_device {
                let busy = self.busy(Some(phase));
                row.extend([ms(busy), share(busy, sum.whole)]);
            }
            table.push(row);
        }
        let outside = self.wall.saturating_sub(covered);
        table.push([OUTSIDE, "", &ms(outside), "", &share(outside, self.wall)]);
        table.push(["total", "", &ms(self.wall), "", &share(self.wall, self.wall)]);
        table
    }

    fn operations(&self, phase: u32) -> Table {
        let with_device = !self.launches.queues.is_empty();
        let mut header = vec!["operation", "count", "host ms", "mean us", "share"];
        if with_device {
            header.extend(["launches", "device ms", "mean us", "share"]);
        }
        let mut groups: Vec<u32> = self
            .host
            .keys()
            .chain(self.device.keys())
            .filter(|place| place.0 == phase)
            .map(|place| place.1)
            .collect();
        groups.sort_unstable();
        groups.dedup();
        let with_bytes = self.of_phase(phase, None).amounts.bytes > 0;
        if with_bytes {
            header.extend(["MB", "GB/s", "of copy"]);
        }
        let mut table = Table::new(header);
        let times = |sums: Option<&Sum>| {
            sums.map_or(Times::default(), |sum| Times {
                count: sum.count,
                total: sum.own,
                bytes: sum.amounts.bytes,
            })
        };
        let mut rows: Vec<(String, [Times; 2])> = groups
            .into_iter()
            .map(|group| {
                let place = (phase, group);
                let name = &self.labels.group_names[group as usize];
                let name = match group == phase && name != OUTSIDE {
                    true => format!("(rest of {name})"),
                    false => name.clone(),
                };
                (name, [times(self.host.get(&place)), times(self.device.get(&place))])
            })
            .collect();
        rows.sort_by_key(|(_, [host, device])| std::cmp::Reverse(host.total.max(device.total)));
        let total = |which: usize, rows: &[(String, [Times; 2])]| {
            let add = |sum: Times, (_, times): &(String, [Times; 2])| Times {
                count: sum.count + times[which].count,
                total: sum.total + times[which].total,
                bytes: sum.bytes + times[which].bytes,
            };
            rows.iter().fold(Times::default(), add)
        };
        let all = [total(0, &rows), total(1, &rows)];
        if rows.len() > MOST_ROWS {
            let rest = rows.split_off(MOST_ROWS - 1);
            rows.push((format!("({} others)", rest.len()), [total(0, &rest), total(1, &rest)]));
        }
        rows.push(("total".into(), all));
        for (name, [host, device]) in rows {
            let mut row = vec![name];
            row.extend(host.cells(all[0].total));
            if with_device {
                row.extend(device.cells(all[1].total));
            }
            if with_bytes {
                row.extend(self.traffic(host, device));
            }
            table.push(row);
        }
        table
    }

    /// Divides the device's time of replays among operations in the proportions of the launched
    /// steps. Returns `None` if the phase has no replay or no launched step.
    fn replays(&self, phase: u32) -> Option<Table> {
        let name = |group: u32| &*self.labels.group_names[group as usize];
        let is_replay = |&(of, group): &PhaseGroup| of == phase && name(group) == REPLAY;
        let replays = self.device.iter().find(|(place, _)| is_replay(place))?.1.own;
        let step = self.steps.range((phase, 0)..=(phase, u32::MAX));
        let mut step: Vec<(&str, u64)> = step.map(|(place, &time)| (name(place.1), time)).collect();
        let all: u64 = step.iter().map(|(_, time)| time).sum();
        if all == 0 {
            return None;
        }
        step.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        step.push(("total", all));
        let header = ["operation", "launched step ms", "share", "replays ms"];
        let mut table = Table::new(header);
        for (name, time) in step {
            let part = (replays as f64 * time as f64 / all as f64) as u64;
            table.push([name.to_string(), ms(time), share(time, all), ms(part)]);
        }
        Some(table)
    }

    /// Formats the bytes that operations read, their rate, and its share of the copy rate. The rate
    /// is by the device's time, or by the host's where nothing was launched.
    fn traffic(&self, host: Times, device: Times) -> [String; 3] {
        let time = if device.total > 0 { device.total } else { host.total };
        let rate = host.bytes as f64 / time.max(1) as f64;
        // A copy reads and writes, and its rate counts each byte once.
        let of_copy = self.copy_rate.map(|copied| format!("{:.0}%", 100.0 * rate * 1e9 / copied));
        match host.bytes {
            0 => [""; 3].map(String::from),
            bytes => [
                format!("{:.3}", bytes as f64 / 1e6),
                format!("{rate:.2}"),
                of_copy.unwrap_or_default(),
            ],
        }
    }

    fn kernels(&self) -> Table {
        let mut kernels: HashMap<String, Times> = HashMap::new();
        for launch in self.launches.queues.iter().flat_map(|queue| &queue.launches) {
            let times = kernels.entry(kernel_name(launch)).or_default();
            times.add(launch.end.saturating_sub(launch.start));
        }
        self.sorted(["kernel", "launches", "device ms", "mean us", "share"], kernels)
    }

    /// Lists the host's operations while the device was idle.
    fn idle(&self, logs: &[&ThreadLog]) -> Table {
        let mut idle: HashMap<String, Times> = HashMap::new();
        for queue in &self.launches.queues {
            let host = Host::new(logs.get(queue.thread).map_or(&[], |log| &log.bars));
            for gap in queue.gaps() {
                for (label, nanoseconds) in host.during(gap.start, gap.end) {
                    let name = match label.map(|label| &self.labels.list[label as usize]) {
                        Some(label) if label.kind == Kind::Phase => {
                            format!("(rest of {})", label.group)
                        }
                        Some(label) => label.group.clone(),
                        None => OUTSIDE.into(),
                    };
                    idle.entry(format!("host in {name}")).or_default().add(nanoseconds);
                }
            }
        }
        self.sorted(["while the device was idle", "parts", "idle ms", "mean us", "share"], idle)
    }

    fn sorted(&self, header: [&str; 5], times: HashMap<String, Times>) -> Table {
        let mut table = Table::new(header);
        let mut rows: Vec<(String, Times)> = times.into_iter().collect();
        rows.sort_by(|(a, x), (b, y)| y.total.cmp(&x.total).then(a.cmp(b)));
        let sum = |rows: &[(String, Times)]| Times {
            count: rows.iter().map(|(_, times)| times.count).sum(),
            total: rows.iter().map(|(_, times)| times.total).sum(),
            bytes: 0,
        };
        let all = sum(&rows);
        if rows.len() > MOST_ROWS {
            let rest = rows.split_off(MOST_ROWS - 1);
            rows.push((format!("({} others)", rest.len()), sum(&rest)));
        }
        rows.push(("total".into(), all));
        for (name, times) in rows {
            let [count, total, mean, share] = times.cells(all.total);
            table.push([name, count, total, mean, share]);
        }
        table
    }
}

/// The kernel's name, without the path and the types of its parameters.
pub(crate) fn kernel_name(launch: &Launch) -> String {
    let name = launch.kernel.split('<').next().unwrap_or(launch.kernel);
    name.rsplit("::").next().unwrap_or(name).to_string()
}

/// Looks up the span that a thread was in at a time.
pub(crate) struct Host {
    /// Start, end and label, one after the other.
    parts: Vec<(u64, u64, u32)>,
}

impl Host {
    pub(crate) fn new(bars: &[Bar]) -> Self {
        let mut bars: Vec<&Bar> = bars.iter().collect();
        bars.sort_by_key(|bar| (bar.start, bar.row));
        let mut parts = vec![];
        let mut open: Vec<&Bar> = vec![];
        let mut at = 0;
        let mut until = |time: u64, label: u32, at: &mut u64| {
            if time > *at {
                parts.push((*at, time, label));
                *at = time;
            }
        };
        for bar in bars {
            while let Some(last) = open.pop_if(|last| last.end <= bar.start) {
                until(last.end, last.label, &mut at);
            }
            if let Some(last) = open.last() {
                until(bar.start, last.label, &mut at);
            }
            at = at.max(bar.start);
            open.push(bar);
        }
        while let Some(last) = open.pop() {
            until(last.end, last.label, &mut at);
        }
        Self { parts }
    }

    /// The innermost spans from `start` to `end`, and for how many nanoseconds each; `None` for
    /// none.
    pub(crate) fn during(&self, start: u64, end: u64) -> Vec<(Option<u32>, u64)> {
        let mut found = vec![];
        let mut at = start;
        let first = self.parts.partition_point(|&(_, ended, _)| ended <= start);
        for &(from, to, label) in &self.parts[first..] {
            if from >= end {
                break;
            }
            if from > at {
                found.push((None, from - at));
            }
            let (from, to) = (from.max(at), to.min(end));
            found.push((Some(label), to - from));
            at = to;
        }
        if at < end {
            found.push((None, end - at));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_span_is_found() {
        let bar = |label, row, start, end| Bar { label, detail: None, row, start, end };
        let bars = [bar(0, 0, 10, 100), bar(1, 1, 20, 40), bar(2, 1, 40, 60), bar(3, 0, 120, 130)];
        let host = Host::new(&bars);
        assert_eq!(
            host.parts,
            [(10, 20, 0), (20, 40, 1), (40, 60, 2), (60, 100, 0), (120, 130, 3)]
        );
        let found = host.during(30, 125);
        let expected = [(Some(1), 10), (Some(2), 20), (Some(0), 40), (None, 20), (Some(3), 5)];
        assert_eq!(found, expected);
        assert_eq!(host.during(0, 5), [(None, 5)]);
        assert_eq!(host.during(5, 15), [(None, 5), (Some(0), 5)]);
    }
}
