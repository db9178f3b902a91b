//! Processes shards with the model, one after the other. Meanwhile, the next shard is read and the
//! previous one is committed.

use bytes::Bytes;
use stoker_api::contract::{Directive, ExitCode};
use stoker_api::inference::{
    Commit, FILES_FORMAT, InferenceTask, OnError, PlanShard, RowError, ShardPlan, part_name,
};
use stoker_storage::hash::sha256_hex;

use super::commits::Commits;
use super::input_reader::InputReader;
use super::output_folder::OutputFolder;
use super::part_writer::PartWriter;
use super::rows::{BadRow, Row};
use super::source::Source;
use super::{Inference, interrupted, remedy, task};
use crate::collective::ProgressState;
use crate::context::Context;
use crate::error::Interrupted;
use crate::{InvalidInput, Result};

/// Maximum number of rows between two checks for a stop request. Rejected rows reach no batch.
const INTERRUPT_ROWS: u64 = 1024;
/// Maximum length of the reason of a rejected row, in characters.
const REASON_CHARS_MAX: usize = 200;
/// Length of the end of a shortened reason, in characters. It contains the expected type.
const REASON_END_CHARS: usize = 75;
/// Mark in the middle of a shortened reason.
const OMITTED: &str = " ... ";

/// Processes the shards of this process's slot that are not committed.
///
/// # Errors
///
/// Returns errors of the input, the program or the storage, or [`Interrupted`](crate::Interrupted)
/// on preemption.
pub(super) fn work<T: Inference>(context: &Context) -> Result<()> {
    let (task, output) = (task(context)?, OutputFolder::open(context)?);
    if output.is_finished()? {
        return Ok(());
    }
    let plan = output.plan()?;
    let committed = output.committed()?;
    let assigned =
        (0..).zip(&plan.shards).filter(|(shard, _)| shard % task.slots.max(1) == task.slot);
    let assigned: Vec<(u32, &PlanShard)> = assigned.collect();
    let total = assigned.iter().map(|(_, planned)| u64::from(planned.rows)).sum();
    // Shards committed earlier count as done, but are not progress of this process.
    let committed_shards = assigned.iter().filter(|(shard, _)| committed.contains(shard));
    let done: u64 = committed_shards.map(|(_, planned)| u64::from(planned.rows)).sum();
    let mut commits = Commits::new(context, &output, done, total);
    let todo: Vec<_> =
        assigned.into_iter().filter(|(shard, _)| !committed.contains(shard)).collect();
    let worked = match todo.is_empty() {
        true => Ok(()),
        // Load the model only if there is a shard to process.
        false => check_interrupt(context)
            .and_then(|()| Worker::<T>::new(context, &task, &output, &plan))
            .and_then(|mut worker| worker.shards(&todo, &mut commits)),
    };
    // A shard that was processed before an error or a stop is committed. Its failure is reported
    // first, because it occurred in an earlier shard.
    commits.finish()?;
    context.distributed().progress.training_finished();
    worked
}

/// State of a working process.
struct Worker<'a, T> {
    context: &'a Context,
    task: &'a InferenceTask,
    plan: &'a ShardPlan,
    input: InputReader<'a>,
    program: T,
    /// Whether a column without a field was named. One warning is enough.
    has_warned: bool,
    /// Number of batches so far, the steps that the watchdog sees.
    num_batches: u64,
}

impl<'a, T: Inference> Worker<'a, T> {
    fn new(
        context: &'a Context,
        task: &'a InferenceTask,
        output: &OutputFolder,
        plan: &'a ShardPlan,
    ) -> Result<Self> {
        let source = Source::open(&task.input, &output.rt)?;
        let input = InputReader::new(context, plan, source, output.rt.clone());
        let program = T::new(context)?;
        Ok(Self { context, task, plan, input, program, has_warned: false, num_batches: 0 })
    }

    /// Processes shards, each of which is read during the previous one and committed during the
    /// next one.
    fn shards(&mut self, shards: &[(u32, &PlanShard)], commits: &mut Commits<'_>) -> Result<()> {
        for (i, (shard, planned)) in shards.iter().enumerate() {
            check_interrupt(self.context)?;
            let (input, progress) = (&mut self.input, &self.context.distributed().progress);
            let is_local = input.is_local();
            let rows = while_accessing(progress, is_local, || input.rows(*shard, planned))?;
            if let Some((next, planned)) = shards.get(i + 1) {
                self.input.prefetch(*next, planned);
            }
            let (part, num_rows, rejected) = self.part(planned, rows, commits)?;
            let part = Bytes::from(part.finish()?);
            let commit = self.commit(*shard, planned, &part, num_rows, rejected)?;
            commits.start(commit, part, planned.rows)?;
        }
        Ok(())
    }

    /// Returns the commit of a shard with this part.
    fn commit(
        &self,
        index: u32,
        planned: &PlanShard,
        part: &Bytes,
        rows: u32,
        rejected: Vec<RowError>,
    ) -> Result<Commit> {
        let (plan, attempt) = (self.plan, self.context.config.attempt);
        let num_shards = u32::try_from(plan.shards.len())?;
        let format = self.task.output.format;
        Ok(Commit {
            format: FILES_FORMAT,
            shard: index,
            of: identity(plan, planned).to_owned(),
            part: part_name(index, num_shards, &plan.job_id, attempt, format),
            bytes: part.len() as u64,
            sha256: sha256_hex(part),
            rows,
            rejected,
            attempt,
        })
    }

    /// Returns the outputs of a shard, their number, and the rejected rows.
    fn part(
        &mut self,
        planned: &PlanShard,
        rows: Vec<Row<T::Input>>,
        commits: &mut Commits<'_>,
    ) -> Result<(PartWriter, u32, Vec<RowError>)> {
        let file = &self.plan.files[planned.file as usize].name;
        let (mut part, mut num_rows, mut rejected) =
            (PartWriter::new(&self.task.output)?, 0, vec![]);
        let mut batch = vec![];
        for (row, input) in (planned.first_row..).zip(rows) {
            if (row - planned.first_row).is_multiple_of(INTERRUPT_ROWS) {
                commits.poll()?;
                check_interrupt(self.context)?;
            }
            let checked = input.and_then(|row| match self.program.check(&row) {
                Ok(()) => Ok(row),
                Err(error) => Err(error.to_string().into()),
            });
            match checked {
                Ok(input) => batch.push((row, input)),
                Err(bad) if self.task.on_error == OnError::Skip => {
                    rejected.push(RowError { row, reason: shorten(bad.reason) });
                }
                Err(bad) => return Err(self.bad_row(file, row, bad)),
            }
            if batch.len() == self.task.batch_rows.max(1) as usize {
                commits.poll()?;
                num_rows += self.batch(file, std::mem::take(&mut batch), &mut part)?;
            }
        }
        if !batch.is_empty() {
            num_rows += self.batch(file, batch, &mut part)?;
        }
        if let Some(warning) = part.absent_column().filter(|_| !self.has_warned) {
            self.has_warned = true;
            let (first, last) =
                (planned.first_row + 1, planned.first_row + u64::from(planned.rows));
            eprintln!("stoker: warning: {file}: rows {first} to {last}: {warning}");
        }
        Ok((part, num_rows, rejected))
    }

    /// Returns the error of a row that fails the job.
    fn bad_row(&self, file: &str, row: u64, BadRow { reason, is_of_file }: BadRow) -> crate::Error {
        let reason = shorten(reason);
        match is_of_file {
            // Without these rows, none of the file would be left.
            true => {
                let remedy = remedy::of_rejected_input(self.context);
                InvalidInput(format!("{file}: {reason}; {remedy}")).into()
            }
            false => at_row(file, row, &format!("{reason}; {}", remedy::of_bad_row(self.context))),
        }
    }

    /// Processes one batch of rows with their indices, and returns its number of rows.
    fn batch(
        &mut self,
        file: &str,
        batch: Vec<(u64, T::Input)>,
        part: &mut PartWriter,
    ) -> Result<u32> {
        check_interrupt(self.context)?;
        self.context.distributed().progress.begin_step(self.num_batches);
        self.num_batches += 1;
        let (rows, inputs): (Vec<u64>, Vec<T::Input>) = batch.into_iter().unzip();
        let num = inputs.len();
        let outputs = self.program.batch(inputs)?;
        if outputs.len() != num {
            let why = format!(
                "the program returned {} outputs for {num} inputs; `batch` must return one for \
                 each, in the same order",
                outputs.len()
            );
            return Err(InvalidInput(why).into());
        }
        for (row, output) in rows.into_iter().zip(&outputs) {
            part.push(output).map_err(|error| at_row(file, row, &error))?;
        }
        Ok(u32::try_from(num)?)
    }
}

/// Calls `access`, which accesses a storage. An object store has its own timeouts, but a network
/// file system may never respond, so the watchdog judges the access to local files.
pub(super) fn while_accessing<R>(
    progress: &ProgressState,
    is_local: bool,
    access: impl FnOnce() -> R,
) -> R {
    match is_local {
        true => progress.while_accessing_files(access),
        false => progress.while_waiting(access),
    }
}

/// Error of a row of a file, with its index.
fn at_row(file: &str, row: u64, why: &impl std::fmt::Display) -> crate::Error {
    InvalidInput(format!("{file}: row {}: {why}", row + 1)).into()
}

/// Fails if the process is requested to stop.
fn check_interrupt(context: &Context) -> Result<()> {
    if context.stop.is_set() {
        return Err(interrupted());
    }
    let io = context.io();
    match io.directive() {
        Some(Directive::Preempt | Directive::Stop) => Err(interrupted()),
        Some(Directive::Fenced) => {
            let why = "fenced: another attempt has replaced this one".to_owned();
            Err(Interrupted { code: ExitCode::Infrastructure, fenced: true, why }.into())
        }
        Some(Directive::Continue { .. } | Directive::Wait) | None => Ok(()),
    }
}

/// Shortens the reason of a rejected row in the middle. It may quote a value of any length, but
/// commits and messages must stay small.
fn shorten(reason: String) -> String {
    let num_chars = reason.chars().count();
    if num_chars <= REASON_CHARS_MAX {
        return reason;
    }
    let position =
        |chars: usize| reason.char_indices().nth(chars).map_or(reason.len(), |(at, _)| at);
    let num_start = REASON_CHARS_MAX - REASON_END_CHARS - OMITTED.len();
    let (start, end) = (position(num_start), position(num_chars - REASON_END_CHARS));
    format!("{}{OMITTED}{}", &reason[..start], &reason[end..])
}

/// Returns the hash that identifies a shard's content: its own, or that of its file.
pub(super) fn identity<'a>(plan: &'a ShardPlan, planned: &'a PlanShard) -> &'a str {
    match planned.sha256.as_str() {
        "" => &plan.files[planned.file as usize].sha256,
        sha256 => sha256,
    }
}
