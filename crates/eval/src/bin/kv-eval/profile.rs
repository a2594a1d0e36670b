//! `--profile FILE`: a timeline page of the run.

use std::{
    path::{Path, PathBuf},
    process::exit,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::SystemTime,
};

use anyhow::{Result, bail};
use burn::tensor::Device;
use kv_cli::{INTERRUPTED, OutFile, Screen, error_line, exit_on_interrupt, note, on_interrupt};
use kv_cubecl::{On, Target};
use kv_eval::{
    Versions,
    bench::{COPIED, copy_bandwidth},
    device_name,
};
use kv_models::LanguageModel;
use kv_profile::Recorder;
use kv_world_model::GameRft;

use crate::version::COMMIT;

#[derive(Debug, clap::Args)]
pub(crate) struct ProfileArgs {
    /// Write a timeline page to this file: threads and device queues by layer and operation, with
    /// sums. On WGPU and CUDA every launch is timed, which slows the host down.
    #[arg(long, global = true, value_name = "FILE")]
    profile: Option<PathBuf>,
}

/// Tables that are also printed, and their rows.
const TABLES: usize = 4;
const ROWS: usize = 12;

/// Number of copies that measure the rate of copies.
const COPIES: usize = 5;

#[must_use]
pub(crate) struct Profile(Option<Shared>);

/// The recording, taken by the end of the run or by Ctrl-C.
type Shared = Arc<Mutex<Option<Recording>>>;

struct Recording {
    recorder: Recorder,
    file: OutFile,
    path: PathBuf,
    facts: Vec<(String, String)>,
    device: Option<Device>,
}

impl Recording {
    fn write(self) -> Result<()> {
        let Self { recorder, file, path, facts, .. } = self;
        let timeline = recorder.finish("Where the time goes", facts);
        file.write(timeline.html().as_bytes())?;
        // The others are not a part of the run.
        let of_run = timeline
            .tables
            .iter()
            .filter(|(name, _)| !name.ends_with(" in copy") && !name.ends_with(" in compile"));
        // An error is ignored, because standard error may be closed.
        let _ = of_run.take(TABLES).try_for_each(|(name, table)| {
            Screen::Error.line(format_args!("\n{name}"))?;
            Screen::Error.print(table.first_rows(ROWS)).map(drop)
        });
        note(format_args!("the profile is in {}", path.display()));
        Ok(())
    }
}

/// Writes the page recorded so far and ends the program.
fn interrupted(shared: &Shared) {
    let Some(mut recording) = lock(shared).take() else { return };
    recording.facts.push(("ended".into(), "by Ctrl-C or SIGTERM".into()));
    let code = match recording.write() {
        Ok(()) => INTERRUPTED.into(),
        Err(error) => {
            // An error is ignored, because standard error may be closed.
            let _ = Screen::Error.line(format_args!("error: {}", error_line(&error)));
            1
        }
    };
    exit(code);
}

/// Locks the recording, which a panic of another thread does not damage.
fn lock(shared: &Shared) -> MutexGuard<'_, Option<Recording>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProfileArgs {
    pub(crate) fn path(&self) -> Option<&Path> {
        self.profile.as_deref()
    }

    /// Makes Ctrl-C end the program, unless a profile is recorded: then [`start`](Self::start)
    /// makes it write the page.
    pub(crate) fn end_on_interrupt(&self) -> Result<()> {
        if self.profile.is_none() { exit_on_interrupt() } else { Ok(()) }
    }

    /// Checks that the page can be written, and starts to record. Ctrl-C and SIGTERM write the page
    /// and end the program.
    pub(crate) fn start(&self) -> Result<Profile> {
        let profile = self.record()?;
        if let Some(shared) = &profile.0 {
            let heard = shared.clone();
            on_interrupt(move || interrupted(&heard))?;
        }
        Ok(profile)
    }

    /// Checks that the page can be written, and starts to record. The caller handles signals.
    pub(crate) fn record(&self) -> Result<Profile> {
        let Some(path) = &self.profile else { return Ok(Profile(None)) };
        if path == Path::new("-") {
            bail!("profile -: a page is written to a file, not to standard output");
        }
        let file = OutFile::open("profile", path)?;
        let recorder = Recorder::new();
        recorder.install()?;
        let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let command: Vec<String> = kv_cli::command_line();
        let facts = [
            ("date", date),
            ("version", Versions::BUILT.to_string()),
            ("commit", COMMIT.to_string()),
            ("command", command.join(" ")),
        ];
        let facts = facts.map(|(name, value)| (name.to_string(), value)).to_vec();
        let recording = Recording { recorder, file, path: path.clone(), facts, device: None };
        let shared = Arc::new(Mutex::new(Some(recording)));
        Ok(Profile(Some(shared)))
    }
}

impl Profile {
    /// Returns a handler that writes the page recorded so far, if any, and ends the program.
    pub(crate) fn interrupted(&self) -> impl Fn() + Send + 'static {
        let shared = self.0.clone();
        move || shared.iter().for_each(interrupted)
    }

    /// Records the device, and compares its clock with the host's.
    pub(crate) fn device<T: Target>(&mut self, device: &On<T>) -> Result<()> {
        if self.0.is_none() {
            return Ok(());
        }
        let rate = copy_bandwidth(device, COPIED, COPIES)?;
        let of_device = |Recording { recorder, facts, device: at, .. }: &mut Recording| {
            *at = Some((**device).clone());
            recorder.set_copy_rate(rate);
            facts.push(("backend".into(), T::NAME.into()));
            facts.push(("adapter".into(), device_name(device)));
            facts.push(("copies".into(), format!("{:.2} GB/s", rate / 1e9)));
            Ok(recorder.calibrate(device)?)
        };
        self.change(of_device).unwrap_or(Ok(()))
    }

    /// Records the model. Must be called before it runs.
    pub(crate) fn model(&mut self, model: &LanguageModel, name: &str) {
        self.change(|Recording { recorder, facts, .. }| {
            recorder.name_operations(model.operation_names());
            let of_type = |(name, bytes)| format!("{:.1} MB of {name}", bytes as f64 / 1e6);
            let types: Vec<_> = model.weight_types().into_iter().map(of_type).collect();
            let (layers, types) = (model.n_layers(), types.join(", "));
            facts.push(("model".into(), format!("{name}: {layers} layers, {types}")));
        });
    }

    /// Records the world model. Must be called before it runs.
    pub(crate) fn world(&mut self, model: &GameRft) {
        self.change(|Recording { recorder, facts, .. }| {
            recorder.name_operations(model.operation_names());
            let (layers, dtype) = (model.config().n_layers, model.dtype().name());
            facts.push(("model".into(), format!("a world model of {layers} layers in {dtype}")));
        });
    }

    pub(crate) fn fact(&mut self, name: &str, value: impl ToString) {
        self.change(|recording| recording.facts.push((name.into(), value.to_string())));
    }

    fn change<R>(&self, f: impl FnOnce(&mut Recording) -> R) -> Option<R> {
        self.0.as_ref().and_then(|shared| lock(shared).as_mut().map(f))
    }

    pub(crate) fn finish(self) -> Result<()> {
        let Some(shared) = self.0 else { return Ok(()) };
        let Some(recording) = lock(&shared).take() else {
            // Another thread is writing the page and then ends the program.
            loop {
                thread::park();
            }
        };
        if let Some(device) = &recording.device {
            recording.recorder.calibrate(device)?;
        }
        recording.write()
    }
}
