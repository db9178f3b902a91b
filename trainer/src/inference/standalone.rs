//! Inference programs without a runner.

use stoker_api::inference::{
    CheckpointChoice, Column, InferenceInput, InferenceOutput, InferenceTask, OnError, Role,
    RowFormat,
};
use stoker_storage::hash::sha256_hex;

use super::output_folder::{FreshRun, OutputFolder};
use super::task;
use crate::context::Context;
use crate::train::Standalone;
use crate::train::program::arguments::{from_environment, number, object};
use crate::{InvalidInput, Result};

/// Length of a job ID.
const ID_CHARS: usize = 32;

/// Text of `--help`.
pub(super) const HELP: &str = "\
Applies a model to a data set, without a runner. Run the same command again to resume.

  --input PATH           input file, directory or pattern; or s3://, gs://, az://
  --output PATH          output directory; or s3://, gs://, az://
  --input-format FORMAT  jsonLines, csv, parquet or arrow (default: from the file names)
  --output-format FORMAT jsonLines, csv, parquet or arrow (default: jsonLines)
  --output-columns LIST  for parquet and arrow: NAME:TYPE,... (boolean, integer, double, string)
  --checkpoint PATH      directory of the checkpoint with the weights
  --hparams JSON         hyperparameters of the model, a JSON object (default: $STOKER_HPARAMS)
  --data JSON            configuration, as `data` of a job
  --shard-rows N         rows per shard, the unit of commits (default: 1000)
  --batch-rows N         maximum rows per batch (default: 64)
  --skip-errors          reject rows that cannot be read, instead of failing
  --fresh                start over and replace the contents of the output directory; to resume,
                         run the command again without it";

/// Creates the context from the arguments; `None` if they request help.
///
/// # Errors
///
/// Fails on an unknown or invalid argument.
pub(super) fn context(arguments: impl IntoIterator<Item = String>) -> Result<Option<Context>> {
    match parse(arguments)? {
        Some((standalone, task)) => {
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
            // The job ID is derived from the arguments, so that the same command resumes the job.
            // `--fresh` does not change it: see `select_run`.
            let of_job = InferenceTask { replace: false, ..task.clone() };
            let identity = (&of_job, &standalone.hyperparameters, &standalone.data);
            // Earlier versions added the time of a fresh run, and `None` otherwise.
            let id = sha256_hex(&serde_json::to_vec(&(identity, None::<String>))?);
            let mut context = standalone.context()?;
            context.config.experiment = "alone".into();
            context.config.experiment_id = id[..ID_CHARS].to_owned();
            context.config.inference = Some(task);
            // The attempt must differ between processes, so that part names are unique.
            context.config.attempt = u32::try_from(now.as_millis() % u128::from(u32::MAX))?;
            Ok(Some(context))
        }
        None => Ok(None),
    }
}

/// Selects the run of the job: a new one with `--fresh`, otherwise the latest. A run has its own
/// ID, so that the output of earlier runs remains until this one is finished.
///
/// # Errors
///
/// Fails if the output directory cannot be read or written.
pub(super) fn select_run(context: &mut Context) -> Result<()> {
    let mut task = task(context)?;
    let output = OutputFolder::open(context)?;
    let run = match task.replace {
        true => {
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
            let id = format!("{} {}", context.config.experiment_id, now.as_nanos());
            let job_id = sha256_hex(id.as_bytes())[..ID_CHARS].to_owned();
            let replaces = output.manifest()?.map(|manifest| manifest.job_id);
            let run = FreshRun { job_id, replaces };
            output.write_fresh_run(&run)?;
            Some(run)
        }
        false => output.fresh_run()?,
    };
    // It may replace what it could replace when it started, but not a later output.
    task.replaced_job = run.as_ref().and_then(|run| run.replaces.clone());
    task.replace = task.replaced_job.is_some();
    if let Some(run) = run {
        context.config.experiment_id = run.job_id;
    }
    context.config.inference = Some(task);
    Ok(())
}

fn parse(
    arguments: impl IntoIterator<Item = String>,
) -> Result<Option<(Standalone, InferenceTask)>> {
    let mut standalone = Standalone { quiet: true, ..from_environment()? };
    let (mut input, mut checkpoint) = (None, None);
    let mut task = InferenceTask {
        role: Role::Work,
        slot: 0,
        slots: 1,
        input: InferenceInput { url: String::new(), endpoint: None, format: None },
        output: InferenceOutput::default(),
        checkpoint: None,
        has_hyperparameters: true,
        replace: false,
        replaced_job: None,
        shard_rows: 1000,
        batch_rows: 64,
        on_error: OnError::Fail,
    };
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let (name, joined) = match argument.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (argument, None),
        };
        match name.as_str() {
            "--help" | "-h" => return Ok(None),
            "--skip-errors" => {
                task.on_error = OnError::Skip;
                continue;
            }
            "--fresh" => {
                task.replace = true;
                continue;
            }
            _ => {}
        }
        let mut value = || -> Result<String> {
            let value = joined.clone().or_else(|| arguments.next());
            Ok(value.ok_or_else(|| format!("{name} needs a value"))?)
        };
        match name.as_str() {
            "--input" => input = Some(value()?),
            "--output" => task.output.url = Some(value()?),
            "--input-format" => task.input.format = Some(format(&name, &value()?)?),
            "--output-format" => task.output.format = format(&name, &value()?)?,
            "--output-columns" => task.output.columns = columns(&name, &value()?)?,
            "--checkpoint" => checkpoint = Some(value()?),
            "--hparams" => standalone.hyperparameters = object(&name, &value()?)?,
            "--data" => standalone.data = object(&name, &value()?)?,
            "--shard-rows" => task.shard_rows = number::<u32>(&name, &value()?)?.max(1),
            "--batch-rows" => task.batch_rows = number::<u32>(&name, &value()?)?.max(1),
            _ => {
                return Err(format!("unknown argument {name}; --help lists all arguments").into());
            }
        }
    }
    let missing =
        |name: &str| InvalidInput(format!("{name} is missing; --help lists the arguments"));
    // Make paths absolute: relative paths mean another job in another working directory.
    task.input.url = absolute(input.ok_or_else(|| missing("--input"))?)?;
    task.output.url = Some(absolute(task.output.url.ok_or_else(|| missing("--output"))?)?);
    let choice = |folder| CheckpointChoice { folder: Some(folder), ..CheckpointChoice::default() };
    task.checkpoint = checkpoint.map(absolute).transpose()?.map(choice);
    check_columns(&task.output)?;
    Ok(Some((standalone, task)))
}

/// Returns an absolute path; leaves URLs unchanged.
fn absolute(url: String) -> Result<String> {
    if url.contains("://") {
        return Ok(url);
    }
    let path: std::path::PathBuf = std::path::absolute(&url)?.components().collect();
    let text = path.into_os_string().into_string();
    Ok(text.map_err(|path| format!("path {} is not UTF-8; rename it", path.display()))?)
}

/// Parses `NAME:TYPE,...`.
fn columns(name: &str, text: &str) -> Result<Vec<Column>> {
    let column = |text: &str| {
        let (name, kind) = text.rsplit_once(':')?;
        let kind = serde_json::from_value(kind.trim().into()).ok()?;
        Some(Column { name: name.trim().to_owned(), kind }).filter(|column| !column.name.is_empty())
    };
    let columns: Vec<Column> = text
        .split(',')
        .map(|text| {
            column(text).ok_or_else(|| {
                format!(
                    "{name} must be NAME:TYPE,... with types boolean, integer, double or string, \
                     not {text:?}"
                )
            })
        })
        .collect::<Result<_, _>>()?;
    let is_repeated = |i: &usize| columns[..*i].iter().any(|other| other.name == columns[*i].name);
    match (1..columns.len()).find(is_repeated) {
        Some(i) => Err(format!("{name} contains column {:?} twice", columns[i].name).into()),
        None => Ok(columns),
    }
}

fn check_columns(output: &InferenceOutput) -> Result<()> {
    match (output.format.is_typed(), output.columns.is_empty()) {
        (true, true) => {
            let why = "--output-format parquet and arrow require --output-columns NAME:TYPE,... \
                       with the output's fields and their types: boolean, integer, double or \
                       string";
            Err(InvalidInput(why.into()).into())
        }
        (false, false) => {
            let why = "--output-columns requires --output-format parquet or arrow; remove it";
            Err(InvalidInput(why.into()).into())
        }
        _ => Ok(()),
    }
}

fn format(name: &str, text: &str) -> Result<RowFormat> {
    let read = serde_json::from_value(serde_json::Value::from(text));
    Ok(read.map_err(|_| format!("{name} must be jsonLines, csv, parquet or arrow, not {text}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(arguments: &str, expected: Result<fn(&InferenceTask) -> bool, &str>) {
        let parsed = parse(arguments.split_whitespace().map(str::to_owned));
        match (parsed, expected) {
            (Ok(Some((_, task))), Ok(is_match)) => assert!(is_match(&task), "{task:?}"),
            (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
            (parsed, _) => panic!("{arguments}: {parsed:?}"),
        }
    }

    #[test]
    fn arguments_are_parsed() {
        check("--input a --output b", Ok(|task| task.shard_rows == 1000));
        let here = "--input a/./*.csv --output b/ --checkpoint c";
        check(
            here,
            Ok(|task| task.input.url.starts_with('/') && task.input.url.ends_with("/a/*.csv")),
        );
        check(here, Ok(|task| task.output.url == Some(absolute("b".into()).unwrap())));
        check(
            here,
            Ok(|task| task.checkpoint.as_ref().unwrap().folder.as_ref().unwrap().starts_with('/')),
        );
        check("--input s3://a/b --output /c", Ok(|task| task.input.url == "s3://a/b"));
        check("--input=a --output=b --skip-errors", Ok(|task| task.on_error == OnError::Skip));
        let formats = "--input a --output b --output-format csv --shard-rows 7";
        check(formats, Ok(|task| task.output.format == RowFormat::Csv && task.shard_rows == 7));
        check("--input a --output b --fresh", Ok(|task| task.replace));
        check("--input a --output b --output-format x", Err("not x"));
        let typed = "--input a --output b --output-format parquet";
        check(typed, Err("require --output-columns"));
        let named = format!("{typed} --output-columns name:string,size:double");
        check(
            &named,
            Ok(|task| task.output.columns[1].name == "size" && task.output.columns.len() == 2),
        );
        check(&format!("{typed} --output-columns name"), Err("must be NAME:TYPE,..."));
        check(&format!("{typed} --output-columns name:text"), Err("not \"name:text\""));
        check(&format!("{typed} --output-columns a:string,a:double"), Err("\"a\" twice"));
        check("--input a --output b --output-columns a:string", Err("remove it"));
        check("--output b", Err("--input is missing"));
        check("--input a", Err("--output is missing"));
        check("--input", Err("--input needs a value"));
        check("--x 1", Err("unknown argument --x"));
    }

    #[test]
    fn job_id_depends_on_the_arguments() {
        let id = |arguments: &str| {
            let arguments = arguments.split_whitespace().map(str::to_owned);
            context(arguments).unwrap().unwrap().config.experiment_id
        };
        let first = id("--input a --output b");
        assert_eq!(id("--output b --input a"), first);
        for other in ["--input c --output b", "--input a --output b --checkpoint d"] {
            assert_ne!(id(other), first, "{other}");
        }
        assert_eq!(id("--input a --output b --fresh"), first);
    }
}
