//! Makes the page of a recording.

use std::collections::HashMap;

use kv_models::spans::REPLAY;
use kv_report::{
    Timeline,
    timeline::{Bar, Kind, Label, Lane},
};

use crate::{
    clock::Clock,
    label::{Labels, OUTSIDE},
    launch::{Launch, Launches, Queue, Timing},
    log::{ROOM, ThreadLog},
    sums::{Host, Sums, kernel_name},
};

/// Gaps that are shorter, in nanoseconds, are summed and not drawn.
const SHORT_GAP: u64 = 1_000;

pub(crate) fn timeline(
    title: &str,
    mut facts: Vec<(String, String)>,
    labels: &Labels,
    logs: &[&ThreadLog],
    launches: &Launches,
    (wall, copy_rate): (u64, Option<f64>),
) -> Timeline {
    let mut page = Page { labels: labels.list.clone(), ..Page::default() };
    let lanes = logs.iter().map(|log| Lane { name: log.name.clone(), bars: log.bars.clone() });
    let mut lanes: Vec<Lane> = lanes.filter(|lane| !lane.bars.is_empty()).collect();
    for queue in &launches.queues {
        let log = logs.get(queue.thread).copied();
        let thread = log.map_or("", |log| &log.name);
        let name = format!("queue of {thread}");
        facts.push((format!("clock of the {name}"), clock(queue)));
        lanes.push(Lane { name, bars: page.bars(queue, log) });
    }
    facts.push(("recorded".into(), format!("{:.3} s", wall as f64 / 1e9)));
    let dropped = logs.iter().map(|log| log.dropped).sum::<u64>() + page.dropped;
    Timeline {
        title: title.into(),
        facts,
        notes: notes(launches, dropped),
        labels: page.labels,
        details: page.details,
        lanes,
        tables: Sums::new(labels, logs, launches, (wall, copy_rate)).tables(logs),
    }
}

/// Labels and details of queues.
#[derive(Default)]
struct Page {
    labels: Vec<Label>,
    details: Vec<String>,
    found: HashMap<String, u32>,
    gaps: HashMap<Option<u32>, u32>,
    none: Option<u32>,
    dropped: u64,
}

impl Page {
    /// Returns the bars of launches and of the gaps between them.
    fn bars(&mut self, queue: &Queue, log: Option<&ThreadLog>) -> Vec<Bar> {
        let mut bars = vec![];
        let mut free: Vec<u64> = vec![]; // when each row is
        for launch in queue.launches.iter().take(ROOM) {
            let row = free.iter().position(|&end| end <= launch.start).unwrap_or(free.len());
            free.resize(free.len().max(row + 1), 0);
            free[row] = launch.end;
            let detail = Some(self.detail(kernel_name(launch)));
            let label = launch.label.unwrap_or_else(|| self.outside());
            let Launch { start, end, .. } = *launch;
            bars.push(Bar { label, detail, row: row as u16, start, end });
        }
        self.dropped += queue.launches.len().saturating_sub(ROOM) as u64;
        let host = Host::new(log.map_or(&[], |log| &log.bars));
        for gap in queue.gaps() {
            let (start, end) = (gap.start, gap.end);
            if end - start < SHORT_GAP || gap.next >= ROOM {
                continue;
            }
            let longest = host.during(start, end).into_iter().max_by_key(|(_, length)| *length);
            let doing = longest.and_then(|(label, _)| label);
            let doing = doing.map_or(OUTSIDE, |label| &self.labels[label as usize].name);
            let detail = Some(self.detail(format!("meanwhile the host was mostly in {doing}")));
            let label = self.gap(queue.launches[gap.next].label);
            bars.push(Bar { label, detail, row: 0, start, end });
        }
        bars
    }

    fn detail(&mut self, text: String) -> u32 {
        let Self { details, found, .. } = self;
        *found.entry(text).or_insert_with_key(|text| {
            details.push(text.clone());
            details.len() as u32 - 1
        })
    }

    fn label(&mut self, name: String, group: &str, kind: Kind) -> u32 {
        self.labels.push(Label { name, group: group.into(), kind });
        self.labels.len() as u32 - 1
    }

    fn outside(&mut self) -> u32 {
        if let Some(label) = self.none {
            return label;
        }
        let label = self.label(OUTSIDE.into(), OUTSIDE, Kind::Operation);
        *self.none.insert(label)
    }

    /// Returns the label of gaps that end with a launch of `next`.
    fn gap(&mut self, next: Option<u32>) -> u32 {
        if let Some(&label) = self.gaps.get(&next) {
            return label;
        }
        let before = next.map_or(OUTSIDE, |label| &self.labels[label as usize].name);
        let label = self.label(format!("idle before {before}"), "idle", Kind::Idle);
        self.gaps.insert(next, label);
        label
    }
}

/// Describes the error of a queue's times.
fn clock(queue: &Queue) -> String {
    let us = |nanoseconds: f64| format!("{:.1} us", nanoseconds / 1e3);
    match queue.timing {
        Timing::Device(Clock { error, drifted, .. }) => {
            let message =
                format!("the device's timestamps, within {} of the host's clock", us(error));
            let message = match drifted {
                Some((drift, error)) => {
                    let (drift, error) = (us(drift), us(error));
                    format!("{message}; drift over the run {drift}, within {error}, taken out")
                }
                None => format!("{message}; its drift is not known"),
            };
            let early = |launch: &&Launch| launch.start as f64 + error < launch.issued as f64;
            match queue.launches.iter().filter(early).count() {
                0 => format!("{message}; no launch begins before it is issued"),
                n => format!("{message}; {n} launches seem to begin before they are issued"),
            }
        }
        Timing::Uncompared => {
            "the device's timestamps, moved so that no launch runs before it is issued; its \
             drift is \
             not known"
                .into()
        }
        Timing::Host => {
            "the host's: this adapter has no timestamps, so that the host waits for every \
             launch, and \
             its time has that of the submission in it"
                .into()
        }
    }
}

/// Describes the host time spent on launches.
fn issuing(launches: &Launches) -> String {
    let mut first: HashMap<&str, u64> = HashMap::new();
    let (mut n, mut all) = (0, 0);
    let all_queues = launches.queues.iter().flat_map(|queue| &queue.launches);
    for launch in all_queues.filter(|launch| launch.kernel != REPLAY) {
        first.entry(launch.kernel).or_insert(launch.host);
        (n, all) = (n + 1, all + launch.host);
    }
    let of_first: u64 = first.values().sum();
    let others = (n - first.len()).max(1) as f64;
    format!(
        "{n} launches took {:.1} ms of the host to issue and time: {:.1} ms the first of each \
         of {} kernels, \
         which compiles it, and {:.1} us each of the others.",
        all as f64 / 1e6,
        of_first as f64 / 1e6,
        first.len(),
        all.saturating_sub(of_first) as f64 / others / 1e3
    )
}

fn notes(launches: &Launches, dropped: u64) -> Vec<String> {
    let mut notes = vec![
        "Operations are named by layer and module (L3/qkv) and summed over layers (qkv); host \
         times \
         are those of the span itself, without the spans within it, on all threads."
            .to_string(),
    ];
    if launches.queues.is_empty() {
        notes.push(
            "Everything ran on threads of the host. A span named rows waits for rows that all \
             threads compute."
                .into(),
        );
    } else {
        let waits = "The host waits for the server of the device at every launch to have it \
        timed, which takes \
                     longer than without a profile: gaps between launches are wider, and the \
                     device's own times \
                     are not.";
        notes.push(format!("{waits} {}", issuing(launches)));
    }
    if launches.unmeasured > 0 {
        notes.push(format!(
            "{} launches have no time of their own: they were captured, so that a replay is all \
             of them as one, or the device did not say when they ran. The first step of a graph is \
             launched instead, and the time of its replays is divided among operations in the same \
             proportions.",
            launches.unmeasured
        ));
    }
    if dropped > 0 {
        notes.push(format!(
            "{dropped} bars beyond the first {ROOM} of a thread or queue are not drawn. The \
             tables count them, \
             but for what the host did in gaps after them, which they call {OUTSIDE}."
        ));
    }
    notes
}
