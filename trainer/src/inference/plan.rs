//! Planning of a job: divides the input into shards and selects the checkpoint.

use std::io::{self, Read};

use stoker_api::inference::{
    FILES_FORMAT, InferenceTask, PinnedCheckpoint, PlanFile, PlanShard, RowFormat, ShardPlan,
};
use stoker_api::names::MANIFEST;
use stoker_storage::input::{ListedFile, first_difference};

use super::output_folder::OutputFolder;
use super::part_writer::PartWriter;
use super::scan::{Division, SHARDS_MAX};
use super::source::Source;
use super::{infrastructure, interrupted, print_line, progress, remedy, scan, task};
use crate::context::Context;
use crate::stop::StopSignal;
use crate::{CheckpointSource, InvalidInput, Result};

/// Writes the plan. If a plan exists, checks that the input still matches it.
///
/// # Errors
///
/// Fails if the input cannot be read or has changed, if no checkpoint exists, or if the output
/// directory belongs to another job.
pub(super) fn plan(context: &Context) -> Result<()> {
    let (task, output) = (task(context)?, OutputFolder::open(context)?);
    if output.is_finished()? {
        let rows = output.manifest()?.map_or(0, |manifest| manifest.input_rows);
        progress(context, 0, rows);
        return Ok(());
    }
    // Check the output format now, not after hours of work.
    PartWriter::new(&task.output)?;
    let source = Source::open(&task.input, &output.rt)?.excluding_output(&output, &task)?;
    let (listed, format) = source.list()?;
    refuse_other_jobs(context, &task, &output)?;
    if let Some(plan) = output.find_plan()? {
        progress(context, 0, plan.rows());
        return refuse_changes(context, &plan, &task, &listed, format);
    }
    let checkpoint = pin_checkpoint(context, &task, &output)?;
    let job_id = context.config.experiment_id.clone();
    let divided = divide_into_shards(context, &source, &listed, format, task.shard_rows);
    let (files, shards) = match divided {
        Err(_) if context.stop.is_set() => return Err(interrupted()),
        divided => divided?,
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
    // Another planner may have written a plan during the long scan, and workers may follow it.
    if let Some(plan) = output.find_plan()? {
        progress(context, 0, plan.rows());
        return refuse_changes(context, &plan, &task, &listed, format);
    }
    output.write_plan(&plan)?;
    progress(context, 0, plan.rows());
    print_line(&format!(
        "{} rows of {} files in {} shards",
        plan.rows(),
        plan.files.len(),
        plan.shards.len()
    ));
    Ok(())
}

/// Refuses to reuse the output of a finished job if its input or checkpoint has changed.
///
/// # Errors
///
/// Fails if the input or the checkpoint has changed or cannot be read.
pub(super) fn refuse_stale(context: &Context) -> Result<()> {
    let (task, output) = (task(context)?, OutputFolder::open(context)?);
    let own_id = &context.config.experiment_id;
    let manifest = output.manifest()?.filter(|manifest| manifest.job_id == *own_id);
    let Some(manifest) = manifest else { return Ok(()) };
    let stale = |difference: String| -> crate::Error {
        let url = output.storage.url();
        let why = format!(
            "{url} contains the finished output of this job, but {difference}; start over with \
             --fresh or use another directory"
        );
        InvalidInput(why).into()
    };
    let source = Source::open(&task.input, &output.rt)?.excluding_output(&output, &task)?;
    let (listed, _) = source.list()?;
    let before: Vec<_> =
        manifest.input.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
    if let Some(difference) = first_difference(&before, &listed) {
        return Err(stale(format!("its input has changed: {difference}")));
    }
    for (file, before) in listed.iter().zip(&manifest.input) {
        let mut from = InterruptibleReader { inner: source.stream(file)?, stop: &context.stop };
        match scan::hash(&mut from) {
            Err(_) if context.stop.is_set() => return Err(interrupted()),
            Err(error) => {
                return Err(infrastructure(format!("cannot read input {}: {error}", file.name)));
            }
            Ok(hash) if hash != before.sha256 => {
                return Err(stale(format!("its input {} has changed", file.name)));
            }
            Ok(_) => {}
        }
    }
    let hash_of = |pinned: &Option<PinnedCheckpoint>| {
        pinned.as_ref().map(|pinned| pinned.manifest_sha256.clone())
    };
    match hash_of(&pin_checkpoint(context, &task, &output)?) == hash_of(&manifest.checkpoint) {
        true => Ok(()),
        false => Err(stale("its checkpoint has changed".into())),
    }
}

fn pin_checkpoint(
    context: &Context,
    task: &InferenceTask,
    output: &OutputFolder,
) -> Result<Option<PinnedCheckpoint>> {
    let Some(choice) = &task.checkpoint else { return Ok(None) };
    let source = CheckpointSource::from_choice(choice)?;
    let pinned = output.rt.block_on(source.pin(&context.config.storage));
    let pinned = pinned.map_err(|error| match error.is::<stoker_storage::StorageError>() {
        true => error,
        false => InvalidInput(of_checkpoint(&error.to_string())).into(),
    })?;
    if pinned.trial_path.is_some() && pinned.hyperparameters.is_null() && !task.has_hyperparameters
    {
        let text = format!(
            "checkpoint: no hyperparameters found next to {}, because an older version trained \
             the model; set spec.hyperparameters",
            pinned.trial_path.as_deref().unwrap_or_default()
        );
        return Err(InvalidInput(text).into());
    }
    Ok(Some(pinned))
}

/// Returns an error about the checkpoint, of which most name it already.
fn of_checkpoint(error: &str) -> String {
    match error.starts_with("checkpoint ") {
        true => error.to_owned(),
        false => format!("checkpoint: {error}"),
    }
}

/// A reader that fails once the process is asked to stop, since reading the input may take hours.
struct InterruptibleReader<'a, R> {
    inner: R,
    stop: &'a StopSignal,
}

impl<R: Read> Read for InterruptibleReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.stop.is_set() {
            true => Err(io::Error::other("preempted")),
            false => self.inner.read(buffer),
        }
    }
}

fn divide_into_shards(
    context: &Context,
    source: &Source,
    listed: &[ListedFile],
    format: RowFormat,
    shard_rows: u32,
) -> Result<(Vec<PlanFile>, Vec<PlanShard>)> {
    let (mut files, mut shards) = (Vec::<PlanFile>::new(), vec![]);
    for (index, file) in (0..).zip(listed) {
        let from = InterruptibleReader { inner: source.stream(file)?, stop: &context.stop };
        let shards_max = SHARDS_MAX.saturating_sub(shards.len());
        let division = Division { shard_rows, shards_max };
        let scanned = scan::scan(format, &file.name, from, division)?;
        if scanned.bytes != file.bytes {
            let why = format!(
                "input {} had {} bytes and then {}: another program is writing to it; wait until \
                 it is complete",
                file.name, file.bytes, scanned.bytes
            );
            return Err(infrastructure(why));
        }
        let mut first_row = 0;
        for range in scanned.ranges {
            let scan::ShardRange { rows, start, end, sha256 } = range;
            shards.push(PlanShard { file: index, first_row, rows, start, end, sha256 });
            first_row += u64::from(rows);
        }
        let (name, bytes) = (file.name.clone(), file.bytes);
        let (sha256, rows, columns) = (scanned.sha256, scanned.rows, scanned.columns);
        files.push(PlanFile { name, bytes, sha256, rows, columns });
    }
    Ok((files, shards))
}

/// Checks names and sizes of the input files. Hashes are verified when a shard is read.
fn refuse_changes(
    context: &Context,
    plan: &ShardPlan,
    task: &InferenceTask,
    listed: &[ListedFile],
    format: RowFormat,
) -> Result<()> {
    let planned: Vec<_> = plan.files.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
    let difference = match first_difference(&planned, listed) {
        Some(difference) => difference,
        None if plan.input != task.input.url => {
            format!("input.url was {}, now {}", plan.input, task.input.url)
        }
        None if plan.input_format != format => {
            format!("the format was {:?}, now {format:?}", plan.input_format)
        }
        None if plan.shard_rows != task.shard_rows => {
            format!("shardRows was {}, now {}", plan.shard_rows, task.shard_rows)
        }
        None => return Ok(()),
    };
    let why = format!(
        "the input has changed since the job began: {difference}; {}",
        remedy::of_changed_input(context)
    );
    Err(InvalidInput(why).into())
}

/// Refuses a directory with the manifest of another job, unless the task may replace that output.
pub(super) fn refuse_other_jobs(
    context: &Context,
    task: &InferenceTask,
    output: &OutputFolder,
) -> Result<()> {
    let other = output.manifest()?.filter(|other| !task.may_replace(&other.job_id));
    let Some(other) = other else { return Ok(()) };
    let why = format!(
        "{} holds the output of job {} ({MANIFEST}, ID {}); {}",
        output.storage.url(),
        other.job,
        other.job_id,
        remedy::of_other_output(context)
    );
    Err(InvalidInput(why).into())
}
