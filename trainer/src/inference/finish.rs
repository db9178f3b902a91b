//! Finishes a job: writes the manifest, which lists one part for each shard.

use stoker_api::inference::{
    Commit, ErrorsPart, FILES_FORMAT, INCOMPLETE_SHARDS, InputFile, OutputManifest, OutputPart,
    PlanShard, ShardPlan, commits_path,
};
use stoker_api::names::MANIFEST;
use stoker_storage::hash::sha256_hex;

use super::output_folder::{OutputFolder, errors_name};
use super::plan::refuse_other_jobs;
use super::work::identity;
use super::{infrastructure, print_line, progress, remedy, task};
use crate::context::Context;
use crate::{InvalidInput, Result};

/// Maximum number of reasons in the error of a job whose rows were all rejected.
const SHOWN_REASONS_MAX: usize = 3;

/// Writes the manifest, then deletes the parts that it does not list. Only one process may do this,
/// and no worker may run at the same time.
///
/// # Errors
///
/// Fails if a shard is not committed, or if all rows of the input were rejected. If a commit exists
/// but its part is missing or invalid, the commit is deleted.
pub(super) fn finish(context: &Context) -> Result<()> {
    let (task, output) = (task(context)?, OutputFolder::open(context)?);
    let plan = output.plan()?;
    let before = output.manifest()?;
    let manifest = match &before {
        Some(manifest) if manifest.job_id == plan.job_id => manifest.clone(),
        _ => {
            let commits = committed(&output, &plan)?;
            refuse_rejected(context, &plan, &commits)?;
            let errors = write_errors(&output, &plan, &commits)?;
            // Another job may have written its manifest after this job began. Check this as late as
            // possible: many commits take minutes to read.
            refuse_other_jobs(context, &task, &output)?;
            let format = task.output.format;
            let job = context.config.experiment.clone();
            let manifest = manifest(job, plan, &commits, errors, format);
            output.write_manifest(&manifest)?;
            manifest
        }
    };
    // The output is complete, so a failure to delete other files is only logged.
    if let Err(error) = clean_up(&output, &manifest, before.as_ref()) {
        eprintln!("stoker: cannot delete parts that the manifest does not list: {error}");
    }
    if manifest.input_rows == 0 {
        eprintln!("stoker: warning: the input has no rows, so the output is empty");
    }
    progress(context, manifest.rows, manifest.input_rows);
    print_line(&format!(
        "{} of {} rows written in {} parts, {} rejected: {}/manifest.json",
        manifest.rows,
        manifest.input_rows,
        manifest.parts.len(),
        manifest.rejected,
        output.storage.url()
    ));
    Ok(())
}

/// Returns the verified commit of every shard.
fn committed(output: &OutputFolder, plan: &ShardPlan) -> Result<Vec<Commit>> {
    let num_shards = u32::try_from(plan.shards.len())?;
    let mut commits = vec![];
    let mut missing = vec![];
    for ((shard, planned), commit) in (0..).zip(&plan.shards).zip(output.commits(num_shards)?) {
        match commit.filter(|commit| is_valid_commit(commit, shard, planned, plan)) {
            Some(commit) => commits.push(commit),
            None => {
                output.delete_commit(shard)?;
                missing.push(shard.to_string());
            }
        }
    }
    if missing.is_empty() {
        return Ok(commits);
    }
    missing.truncate(10);
    Err(infrastructure(format!(
        "{INCOMPLETE_SHARDS}, including {}; they will be processed again",
        missing.join(", ")
    )))
}

/// Fails if the input has rows and all of them were rejected: the input or the program is then not
/// the intended one. Keeps the commits, which contain the reasons.
fn refuse_rejected(context: &Context, plan: &ShardPlan, commits: &[Commit]) -> Result<()> {
    let input_rows = plan.rows();
    if input_rows == 0 || commits.iter().any(|commit| commit.rows > 0) {
        return Ok(());
    }
    let rejected = plan.shards.iter().zip(commits).flat_map(|(planned, commit)| {
        let file = &plan.files[planned.file as usize].name;
        commit
            .rejected
            .iter()
            .map(move |error| format!("{file}: row {}: {}", error.row + 1, error.reason))
    });
    let first: Vec<String> = rejected.take(SHOWN_REASONS_MAX).collect();
    let why = format!(
        "all {input_rows} rows of the input were rejected: {}; {}",
        first.join("; "),
        remedy::of_rejected_input(context)
    );
    Err(InvalidInput(why).into())
}

/// Returns `true` if a commit belongs to this shard and accounts for all of its rows.
fn is_valid_commit(commit: &Commit, shard: u32, planned: &PlanShard, plan: &ShardPlan) -> bool {
    let accounted = u64::from(commit.rows) + commit.rejected.len() as u64;
    commit.format == FILES_FORMAT
        && commit.shard == shard
        && commit.of == identity(plan, planned)
        && accounted == u64::from(planned.rows)
}

fn manifest(
    job: String,
    plan: ShardPlan,
    commits: &[Commit],
    errors: Option<ErrorsPart>,
    output_format: stoker_api::inference::RowFormat,
) -> OutputManifest {
    let part = |(planned, commit): (&PlanShard, &Commit)| OutputPart {
        name: commit.part.clone(),
        bytes: commit.bytes,
        sha256: commit.sha256.clone(),
        rows: commit.rows,
        file: planned.file,
        first_row: planned.first_row,
        input_rows: planned.rows,
    };
    let parts: Vec<_> = plan.shards.iter().zip(commits).map(part).collect();
    let input_rows = plan.rows();
    let rows = parts.iter().map(|part| u64::from(part.rows)).sum();
    let file = |file: stoker_api::inference::PlanFile| InputFile {
        name: file.name,
        bytes: file.bytes,
        sha256: file.sha256,
        rows: file.rows,
    };
    OutputManifest {
        format: FILES_FORMAT,
        job,
        job_id: plan.job_id,
        output_format,
        rows,
        input_rows,
        rejected: input_rows - rows,
        parts,
        errors,
        input: plan.files.into_iter().map(file).collect(),
        checkpoint: plan.checkpoint,
    }
}

/// Writes the file of rejected rows, if there are any.
fn write_errors(
    output: &OutputFolder,
    plan: &ShardPlan,
    commits: &[Commit],
) -> Result<Option<ErrorsPart>> {
    let (mut lines, mut rows) = (String::new(), 0);
    for (planned, commit) in plan.shards.iter().zip(commits) {
        let file = &plan.files[planned.file as usize].name;
        for error in &commit.rejected {
            let line = serde_json::json!({"file": file, "row": error.row, "reason": error.reason});
            lines.push_str(&format!("{line}\n"));
            rows += 1;
        }
    }
    if rows == 0 {
        return Ok(None);
    }
    let name = errors_name(&plan.job_id);
    let (bytes, sha256) = (lines.len() as u64, sha256_hex(lines.as_bytes()));
    output.rt.block_on(output.storage.put(&name, lines.into()))?;
    Ok(Some(ErrorsPart { name, bytes, sha256, rows }))
}

/// Deletes parts of this job that the manifest does not list, and all files of the previous
/// manifest.
fn clean_up(
    output: &OutputFolder,
    manifest: &OutputManifest,
    before: Option<&OutputManifest>,
) -> Result<()> {
    let names = |manifest: &OutputManifest| -> Vec<String> {
        let errors = manifest.errors.iter().map(|errors| errors.name.clone());
        manifest.parts.iter().map(|part| part.name.clone()).chain(errors).collect()
    };
    let kept: std::collections::BTreeSet<String> = names(manifest).into_iter().collect();
    let uid8: String =
        manifest.job_id.chars().filter(char::is_ascii_alphanumeric).take(8).collect();
    let is_job_part = |path: &String| {
        !path.contains('/') && path.starts_with("part-") && path.contains(&format!("-{uid8}-"))
    };
    let is_job_file =
        |name: &str| is_job_part(&name.to_owned()) || kept.contains(name) || name == MANIFEST;
    output.storage.delete_staged("", is_job_file)?;
    output.storage.delete_staged(&commits_path(&manifest.job_id), |_| true)?;
    output.rt.block_on(async {
        let listed = output.storage.list("").await?;
        let old = before.into_iter().flat_map(names);
        let unused =
            listed.into_iter().filter(is_job_part).chain(old).filter(|path| !kept.contains(path));
        for path in unused {
            output.storage.delete(&path).await?;
        }
        Ok(())
    })
}
