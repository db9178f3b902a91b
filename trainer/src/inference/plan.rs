//! The plan: which rows belong together, and which checkpoint they are put through.

use std::io::{self, Read};

use stoker_api::inference::{
    FILES_FORMAT, InferenceTask, PinnedCheckpoint, PlanFile, PlanShard, RowFormat, ShardPlan,
};
use stoker_api::names::MANIFEST;

use super::output::Output;
use super::parts::Part;
use super::source::{Found, Source};
use super::{infrastructure, interrupted, progress, say, scan, task};
use crate::context::Context;
use crate::stop::StopSignal;
use crate::{CheckpointSource, InvalidInput, Result};

/// Shards at most: the plan and the manifest are read whole.
const SHARDS_MAX: usize = 100_000;

/// Writes the plan; where there is one, checks that the input is still the planned one.
///
/// # Errors
///
/// The input cannot be read or has changed; there is no checkpoint; the output folder is another job's.
pub(super) fn plan(context: &Context) -> Result<()> {
    let (task, output) = (task(context)?, Output::open(context)?);
    if output.is_finished()? {
        let rows = output.manifest()?.map_or(0, |it| it.input_rows);
        progress(context, 0, rows);
        return Ok(());
    }
    // Before hours of work, not after.
    Part::new(&task.output)?;
    let source = Source::open(&task.input, &output.rt)?.apart_from(&output, &task)?;
    let (found, format) = source.list()?;
    refuse_other_jobs(&task, &output)?;
    if let Some(plan) = output.find_plan()? {
        progress(context, 0, plan.rows());
        return refuse_changes(&plan, &task, &found, format);
    }
    let checkpoint = pin(context, &task, &output)?;
    let job_id = context.config.experiment_id.clone();
    let cut = cut(context, &source, &found, format, task.shard_rows);
    let (files, shards) = match cut {
        Err(_) if context.stop.is_set() => return Err(interrupted()),
        cut => cut?,
    };
    let (input, shard_rows) = (task.input.url.clone(), task.shard_rows);
    let plan = ShardPlan {
        format: FILES_FORMAT,
        job_id,
        input,
        input_format: format,
        shard_rows,
        files,
        shards,
        checkpoint,
    };
    // Another planner may have been here while this one read for hours, and workers go by its plan.
    if let Some(plan) = output.find_plan()? {
        progress(context, 0, plan.rows());
        return refuse_changes(&plan, &task, &found, format);
    }
    output.write_plan(&plan)?;
    progress(context, 0, plan.rows());
    say(&format!(
        "{} rows of {} files in {} shards",
        plan.rows(),
        plan.files.len(),
        plan.shards.len()
    ));
    Ok(())
}

/// Refuses a job that is finished where what it would read now is not what it has read: its output is not that of these
/// files.
///
/// # Errors
///
/// The input or the checkpoint is another, or cannot be read.
pub(super) fn refuse_stale(context: &Context) -> Result<()> {
    let (task, output) = (task(context)?, Output::open(context)?);
    let manifest = output.manifest()?.filter(|it| it.job_id == context.config.experiment_id);
    let Some(manifest) = manifest else { return Ok(()) };
    let stale = |what: String| -> crate::Error {
        let url = output.storage.url();
        let why = format!(
            "{url} holds what this job has finished, and {what}: start over with --fresh, or choose another folder"
        );
        InvalidInput(why).into()
    };
    let source = Source::open(&task.input, &output.rt)?.apart_from(&output, &task)?;
    let (found, _) = source.list()?;
    let before: Vec<_> = manifest.input.iter().map(|it| (it.name.as_str(), it.bytes)).collect();
    if let Some(what) = change(&before, &found) {
        return Err(stale(format!("its input is another now: {what}")));
    }
    for (file, before) in found.iter().zip(&manifest.input) {
        let mut from = Stoppable { inner: source.stream(file)?, stop: &context.stop };
        match scan::sum(&mut from) {
            Err(_) if context.stop.is_set() => return Err(interrupted()),
            Err(error) => {
                return Err(infrastructure(format!("input {} cannot be read: {error}", file.name)));
            }
            Ok(sum) if sum != before.sha256 => {
                return Err(stale(format!("its input {} has other bytes now", file.name)));
            }
            Ok(_) => {}
        }
    }
    let sum = |it: &Option<PinnedCheckpoint>| it.as_ref().map(|it| it.manifest_sha256.clone());
    match sum(&pin(context, &task, &output)?) == sum(&manifest.checkpoint) {
        true => Ok(()),
        false => Err(stale("its checkpoint is another now".into())),
    }
}

fn pin(
    context: &Context,
    task: &InferenceTask,
    output: &Output,
) -> Result<Option<PinnedCheckpoint>> {
    let Some(choice) = &task.checkpoint else { return Ok(None) };
    let source = CheckpointSource::of_choice(choice)?;
    let pinned = output.rt.block_on(source.pin(&context.config.storage));
    let pinned = pinned.map_err(|error| match error.is::<stoker_storage::StorageError>() {
        true => error,
        false => InvalidInput(format!("checkpoint: {error}")).into(),
    })?;
    if pinned.trial_path.is_some() && pinned.hyperparameters.is_null() && !task.has_hyperparameters
    {
        let text = format!(
            "checkpoint: nothing beside {} says with which hyperparameters its model was made, as an \
             older version has trained it: set spec.hyperparameters",
            pinned.trial_path.as_deref().unwrap_or_default()
        );
        return Err(InvalidInput(text).into());
    }
    Ok(Some(pinned))
}

/// A reader that ends when the process is asked to leave: an input may be read for hours.
struct Stoppable<'a, R> {
    inner: R,
    stop: &'a StopSignal,
}

impl<R: Read> Read for Stoppable<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.stop.is_set() {
            true => Err(io::Error::other("asked to leave")),
            false => self.inner.read(buffer),
        }
    }
}

fn cut(
    context: &Context,
    source: &Source,
    found: &[Found],
    format: RowFormat,
    shard_rows: u32,
) -> Result<(Vec<PlanFile>, Vec<PlanShard>)> {
    let (mut files, mut shards) = (Vec::<PlanFile>::new(), vec![]);
    for (index, file) in (0..).zip(found) {
        let from = Stoppable { inner: source.stream(file)?, stop: &context.stop };
        let scanned = scan::scan(format, &file.name, from, shard_rows)?;
        if scanned.bytes != file.bytes {
            let why = format!(
                "input {} had {} bytes and then {}: it is being written to; wait for the end",
                file.name, file.bytes, scanned.bytes
            );
            return Err(infrastructure(why));
        }
        let mut first_row = 0;
        for cut in scanned.cuts {
            let scan::Cut { rows, start, end, sha256 } = cut;
            shards.push(PlanShard { file: index, first_row, rows, start, end, sha256 });
            first_row += u64::from(rows);
        }
        if shards.len() > SHARDS_MAX {
            let why =
                format!("more than {SHARDS_MAX} shards of {shard_rows} rows: raise shardRows");
            return Err(InvalidInput(why).into());
        }
        let (name, bytes) = (file.name.clone(), file.bytes);
        let (sha256, rows, columns) = (scanned.sha256, scanned.rows, scanned.columns);
        files.push(PlanFile { name, bytes, sha256, rows, columns });
    }
    Ok((files, shards))
}

/// Names and sizes now; what a shard's bytes hash to is checked when they are read.
fn refuse_changes(
    plan: &ShardPlan,
    task: &InferenceTask,
    found: &[Found],
    format: RowFormat,
) -> Result<()> {
    let planned: Vec<_> = plan.files.iter().map(|it| (it.name.as_str(), it.bytes)).collect();
    let what = match change(&planned, found) {
        Some(what) => what,
        None if plan.input != task.input.url => {
            format!("it was {}, and is {}", plan.input, task.input.url)
        }
        None if plan.input_format != format => {
            format!("its format was {:?}, and is {format:?}", plan.input_format)
        }
        None if plan.shard_rows != task.shard_rows => {
            format!("shardRows was {}, and is {}", plan.shard_rows, task.shard_rows)
        }
        None => return Ok(()),
    };
    let why = format!(
        "the input is not what it was when the job began: {what}; bring it back to go on, or start over with --fresh"
    );
    Err(InvalidInput(why).into())
}

/// The first difference in names and sizes.
fn change(before: &[(&str, u64)], found: &[Found]) -> Option<String> {
    let now: Vec<_> = found.iter().map(|it| (it.name.as_str(), it.bytes)).collect();
    let told = |it: Option<&(&str, u64)>| {
        it.map_or("nothing".to_owned(), |(name, bytes)| format!("{name} with {bytes} bytes"))
    };
    let places = 0..before.len().max(now.len());
    let (before, now) =
        places.map(|i| (before.get(i), now.get(i))).find(|(before, now)| before != now)?;
    Some(format!("there was {}, and is {}", told(before), told(now)))
}

/// Refuses a folder that has another job's manifest, unless it is to be replaced.
pub(super) fn refuse_other_jobs(task: &InferenceTask, output: &Output) -> Result<()> {
    let Some(other) = output.manifest()?.filter(|_| !task.replace) else { return Ok(()) };
    let why = format!(
        "{} holds the output of job {} ({MANIFEST}, id {}): choose another folder, or replace it with --fresh",
        output.storage.url(),
        other.job,
        other.job_id
    );
    Err(InvalidInput(why).into())
}
