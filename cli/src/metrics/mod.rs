//! `stoker trial|experiment metrics`: tables with curves, JSON, CSV and Parquet.
//!
//! ```text
//!  metrics/ATTEMPT-SEQ.jsonl --> effective rows --> [filter] --> [rows]: JSON, CSV
//!                                                          |--> [parquet_file]
//!                                                          '--> [curve] --> [table]
//! ```
//!
//! 1. [`filter`]: metrics and groups to print, and the direction of a metric.
//! 2. [`rows`]: rows as JSON lines, and values as CSV.
//! 3. [`parquet_file`]: values as Parquet.
//! 4. [`curve`]: values of one metric, and a line of blocks.
//! 5. [`table`]: curves of a trial or of an experiment.

mod curve;
mod filter;
mod parquet_file;
mod rows;
mod table;

use std::io::Write;

use clap::Args;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use parquet::errors::ParquetError;
use stoker_api::experiment::Searcher;
use stoker_api::trial::Attempt;
use stoker_storage::metrics::{Reader, Row, effective, starts};
use stoker_storage::{Storage, layout};

use self::filter::Filter;
use self::parquet_file::ParquetFile;
use self::table::Curves;
use crate::failure::Failure;
use crate::print::{self, Format};

/// Maximum number of trials whose rows are in memory. The reader limits the requests.
const TRIALS_MAX: usize = 16;

/// Flags of the commands for metrics.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct MetricsArgs {
    /// Print only this metric [default: all metrics; in the table of an experiment, the searched
    /// metric]
    #[arg(long, value_name = "NAME")]
    metric: Option<String>,
    /// Print only this group, such as training or validation [default: all groups; in the table of
    /// an experiment, validation if it has the metric]
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Also print rows that a later attempt has superseded. Tables then have a line for each
    /// attempt
    #[arg(long)]
    all_attempts: bool,
    /// Output format
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

/// Files with the metrics of trials.
#[derive(Debug)]
pub(crate) struct MetricsFiles {
    /// Name of the trial or experiment in messages.
    pub(crate) name: String,
    pub(crate) storage: Storage,
    /// Trials, sorted by index.
    pub(crate) trials: Vec<TrialFiles>,
    /// The search, which determines the direction of metrics.
    pub(crate) searcher: Searcher,
}

impl MetricsFiles {
    /// Returns the URL of a trial's files.
    pub(crate) fn location(&self, trial: &TrialFiles) -> String {
        format!("{}/{}", self.storage.url().trim_end_matches('/'), trial.path)
    }
}

/// Files with the metrics of one trial.
#[derive(Debug)]
pub(crate) struct TrialFiles {
    index: u32,
    /// Path of the trial in the storage.
    path: String,
    /// Attempts that resumed from a checkpoint, each with the batches of the checkpoint.
    resumed: Vec<(u32, u64)>,
}

impl TrialFiles {
    /// Creates the files of the trial at `path` with these recorded attempts.
    pub(crate) fn new(index: u32, path: String, attempts: &[Attempt]) -> Self {
        let batches = |attempt: &Attempt| {
            let (batches, _) = layout::parse_checkpoint_name(attempt.resumed_from.as_deref()?)?;
            Some((attempt.number, batches))
        };
        Self { index, path, resumed: attempts.iter().filter_map(batches).collect() }
    }

    /// Returns the index of the trial.
    pub(crate) fn index(&self) -> u32 {
        self.index
    }
}

/// Prints the metrics of one trial.
pub(crate) async fn print_trial(files: &MetricsFiles, args: &MetricsArgs) -> Result<(), Failure> {
    let mut filter = Filter::new(args.metric.as_deref(), args.group.as_deref());
    let Some(curves) = print_or_collect(files, args, &mut filter).await? else { return Ok(()) };
    print::out(table::of_trial(&curves, &files.searcher));
    Ok(())
}

/// Prints the metrics of all trials of an experiment.
pub(crate) async fn print_experiment(
    files: &MetricsFiles,
    args: &MetricsArgs,
) -> Result<(), Failure> {
    let searched = (args.output == Format::Text).then_some(files.searcher.metric.as_str());
    let mut filter = Filter::new(args.metric.as_deref().or(searched), args.group.as_deref());
    let Some(curves) = print_or_collect(files, args, &mut filter).await? else { return Ok(()) };
    let trials: Vec<u32> = files.trials.iter().map(|trial| trial.index).collect();
    print::out(table::of_experiment(&curves, &trials, &files.searcher));
    Ok(())
}

/// Prints JSON, CSV or Parquet, or returns the curves for a table. Returns `None` if the output is
/// complete.
async fn print_or_collect(
    files: &MetricsFiles,
    args: &MetricsArgs,
    filter: &mut Filter<'_>,
) -> Result<Option<Curves>, Failure> {
    if args.output == Format::Csv {
        print::out(rows::CSV_HEADER);
    }
    let mut parquet = match args.output {
        Format::Parquet => Some(begin_parquet()?),
        _ => None,
    };
    let mut curves = Curves::default();
    let reader = Reader::new(&files.storage);
    let reads = files.trials.iter().map(|trial| read(&reader, trial, args.all_attempts));
    let mut reads = stream::iter(reads).buffered(TRIALS_MAX);
    while let Some((trial, rows)) = reads.try_next().await? {
        let rows = filter.apply(rows);
        if let Some(parquet) = &mut parquet {
            parquet.add(trial, &rows).map_err(not_written)?;
            continue;
        }
        match args.output {
            Format::Json => print::raw(rows::json_lines(trial, &rows)?.as_bytes()),
            Format::Csv => print::raw(rows::csv(trial, &rows).as_bytes()),
            _ => curves.add(trial, args.all_attempts, rows),
        }
    }
    if let Some(parquet) = parquet {
        parquet.finish().map_err(not_written)?;
    }
    if filter.num_printed == 0 {
        filter.check_names(&files.name)?;
        print::err(format!("{} has no metrics yet", files.name));
        return Ok(None);
    }
    Ok(Some(curves).filter(|_| args.output == Format::Text))
}

/// Begins a Parquet file on standard output, which must not be a terminal.
fn begin_parquet() -> Result<ParquetFile<impl Write + Send>, Failure> {
    let output = print::binary().ok_or_else(|| {
        let text = "cannot print Parquet, a binary format: standard output is a terminal; redirect \
                    it, for example with `> metrics.parquet`";
        Failure::Input(text.to_owned())
    })?;
    ParquetFile::new(output).map_err(not_written)
}

/// A Parquet file without its end is unreadable, so unlike for text, a closed pipe is an error too.
fn not_written(error: ParquetError) -> Failure {
    let error = match error {
        ParquetError::External(error) => error.to_string(),
        error => error.to_string(),
    };
    Failure::System(format!("cannot write Parquet to standard output: {error}"))
}

/// Reads the rows of a trial. Returns them with the trial's index.
pub(crate) async fn read(
    reader: &Reader<'_>,
    trial: &TrialFiles,
    all_attempts: bool,
) -> Result<(u32, Vec<Row>), Failure> {
    let rows = reader.rows(&trial.path).await?;
    if all_attempts {
        return Ok((trial.index, rows));
    }
    let attempts = starts(&rows, &trial.resumed);
    Ok((trial.index, effective(rows, &attempts)))
}
