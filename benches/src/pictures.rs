//! Batches of images from files: read, decoded, cropped, flipped and normalized by [`Stream`] or
//! [`Source`].

use std::cell::RefCell;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::ValueEnum;
use png::{BitDepth, ColorType, DecodeOptions};
use stoker_trainer::{BatchContext, Data, Result, Source, Stream, mix_seed};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

/// Width and height of an image.
const SIZE: usize = 256;
/// Width and height of a cropped image.
pub(crate) const CROP: usize = 224;
/// Bytes of a cropped image, `[CROP, CROP, 3]`.
const CROP_BYTES: usize = CROP * CROP * 3;
/// Means of red, green and blue, for pixel values that are scaled to 0 to 1.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
/// Standard deviations of red, green and blue, with the same scale.
const DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];

/// Images `[samples, 3, CROP, CROP]`, and the index of each image in the list of files.
pub(crate) type Pictures = (Tensor<4>, Tensor<1, Int>);

/// File format of the images.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Format {
    /// JPEG, with chroma at half the resolution
    Jpg,
    /// PNG
    Png,
}

/// Trainer API that builds the batches.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum LoaderKind {
    /// A stream of files that `map_seeded` decodes
    Stream,
    /// A source that writes images into the batch
    Source,
}

/// Lists the files of this format in a directory, sorted.
///
/// # Errors
///
/// The directory cannot be read.
pub(crate) fn list(folder: &Path, format: Format) -> Result<Vec<PathBuf>> {
    let extension = match format {
        Format::Jpg => "jpg",
        Format::Png => "png",
    };
    let mut files = vec![];
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|of_path| of_path == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the images in shuffled batches. The crop and flip of a sample depend on its seed.
///
/// # Errors
///
/// Same as [`Data::stream`].
pub(crate) fn data(files: Vec<PathBuf>, format: Format, way: LoaderKind) -> Result<Data<Pictures>> {
    if way == LoaderKind::Source {
        return Ok(Data::new(Files { files, format, augments: true }));
    }
    let num_files = files.len();
    let labeled = files.into_iter().zip(0..).collect();
    let cropped = Stream::list(labeled).shuffle(num_files).map_seeded(
        move |(path, label): (PathBuf, usize), seed| {
            let mut cropped = vec![0; CROP_BYTES];
            decoded(&path, format, |picture| Crop::sampled(seed).cut(picture, &mut cropped))?;
            Ok((cropped, label))
        },
    );
    Data::stream(cropped, |samples: Vec<(Vec<u8>, usize)>, device| {
        let (pictures, labels): (Vec<_>, Vec<_>) = samples.into_iter().unzip();
        let mut batch = Vec::with_capacity(pictures.len() * CROP_BYTES);
        for picture in &pictures {
            normalize(picture, &mut batch);
        }
        tensors(batch, &labels, device)
    })
}

/// Returns the mean and the mean square of the normalized values of the first `num` images, cropped
/// at the top left. They show whether two programs decode and normalize alike.
///
/// # Errors
///
/// A file is not an image of this format.
pub(crate) fn moments(files: &[PathBuf], format: Format, num: usize) -> Result<(f64, f64)> {
    let mut values = vec![];
    let mut cropped = vec![0; CROP_BYTES];
    for path in &files[..num] {
        decoded(path, format, |picture| Crop::default().cut(picture, &mut cropped))?;
        normalize(&cropped, &mut values);
    }
    let mean = |of: fn(f64) -> f64| {
        values.iter().map(|value| of(f64::from(*value))).sum::<f64>() / values.len() as f64
    };
    Ok((mean(|value| value), mean(|value| value * value)))
}

/// Source that decodes images by index.
struct Files {
    files: Vec<PathBuf>,
    format: Format,
    /// Whether images are cropped and flipped at random. Otherwise, the crop is at the top left.
    augments: bool,
}

impl Source<Pictures> for Files {
    fn samples(&self) -> usize {
        self.files.len()
    }

    fn batch(&self, samples: &[usize], at: &BatchContext) -> Result<Pictures> {
        let mut batch = Vec::with_capacity(samples.len() * CROP_BYTES);
        let mut cropped = vec![0; CROP_BYTES];
        for sample in samples {
            let crop = match self.augments {
                true => Crop::sampled(at.sample_seed(*sample)),
                false => Crop::default(),
            };
            let cut = |picture: &[u8]| crop.cut(picture, &mut cropped);
            decoded(&self.files[*sample], self.format, cut)?;
            normalize(&cropped, &mut batch);
        }
        Ok(tensors(batch, samples, at.device))
    }
}

/// Loads the images of these files into memory, cropped at the top left.
///
/// # Errors
///
/// A file is not an image of this format.
pub(crate) fn in_memory(files: Vec<PathBuf>, format: Format) -> Result<Data<Pictures>> {
    let device = &Device::default();
    let (samples, files) =
        ((0..files.len()).collect::<Vec<_>>(), Files { files, format, augments: false });
    let dtype = burn::tensor::DType::F32;
    Data::arrays(files.batch(&samples, &BatchContext { device, dtype, epoch: 0, seed: 0 })?)
}

fn tensors(batch: Vec<f32>, labels: &[usize], device: &Device) -> Pictures {
    let labels: Vec<i64> = labels.iter().map(|label| *label as i64).collect();
    let pictures = TensorData::new(batch, [labels.len(), 3, CROP, CROP]);
    (Tensor::from_data(pictures, device), Tensor::from_data(labels.as_slice(), device))
}

/// Position of a crop, and whether it is flipped horizontally.
#[derive(Debug, Default)]
struct Crop {
    top: usize,
    left: usize,
    is_flipped: bool,
}

impl Crop {
    fn sampled(seed: u64) -> Self {
        let offsets = (SIZE - CROP + 1) as u64;
        let sample = |what: u64, below: u64| (mix_seed(&[seed, what]) % below) as usize;
        Self { top: sample(0, offsets), left: sample(1, offsets), is_flipped: sample(2, 2) == 1 }
    }

    /// Crops `[SIZE, SIZE, 3]` to `[CROP, CROP, 3]`.
    fn cut(&self, picture: &[u8], cropped: &mut [u8]) {
        let rows = picture.chunks_exact(SIZE * 3).skip(self.top);
        for (to, from) in cropped.chunks_exact_mut(CROP * 3).zip(rows) {
            let from = &from[self.left * 3..][..CROP * 3];
            match self.is_flipped {
                false => to.copy_from_slice(from),
                true => {
                    let (to, _) = to.as_chunks_mut::<3>();
                    let (from, _) = from.as_chunks::<3>();
                    to.iter_mut().zip(from.iter().rev()).for_each(|(to, from)| *to = *from);
                }
            }
        }
    }
}

/// Normalizes an image `[CROP, CROP, 3]` and appends it as `[3, CROP, CROP]`.
fn normalize(cropped: &[u8], batch: &mut Vec<f32>) {
    let (pixels, _) = cropped.as_chunks::<3>();
    for channel in 0..3 {
        let scale = 1.0 / (255.0 * DEVIATION[channel]);
        let shift = MEAN[channel] / DEVIATION[channel];
        batch.extend(pixels.iter().map(|pixel| f32::from(pixel[channel]) * scale - shift));
    }
}

thread_local! {
    /// Buffer for the decoded image, reused by all images of the thread.
    static PICTURE: RefCell<Vec<u8>> = const { RefCell::new(vec![]) };
}

/// Decodes an image and passes it to `with`, as `[SIZE, SIZE, 3]`.
fn decoded<T>(path: &Path, format: Format, with: impl FnOnce(&[u8]) -> T) -> Result<T> {
    PICTURE.with_borrow_mut(|picture| {
        picture.resize(SIZE * SIZE * 3, 0);
        let read = match format {
            Format::Jpg => jpg(path, picture),
            Format::Png => png(path, picture),
        };
        read.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(with(picture))
    })
}

fn jpg(path: &Path, picture: &mut [u8]) -> Result<()> {
    let bytes = std::fs::read(path)?;
    let options = DecoderOptions::new_fast().jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(&bytes), options);
    decoder.decode_headers().map_err(|error| format!("{error:?}"))?;
    expect_bytes(decoder.output_buffer_size(), picture)?;
    Ok(decoder.decode_into(picture).map_err(|error| format!("{error:?}"))?)
}

/// Decodes a PNG and verifies the same checksums as libpng.
fn png(path: &Path, picture: &mut [u8]) -> Result<()> {
    let bytes = std::fs::read(path)?;
    let mut options = DecodeOptions::default();
    options.set_ignore_adler32(false);
    let mut reader = png::Decoder::new_with_options(Cursor::new(&bytes), options).read_info()?;
    let is_rgb = reader.output_color_type() == (ColorType::Rgb, BitDepth::Eight);
    expect_bytes(reader.output_buffer_size().filter(|_| is_rgb), picture)?;
    reader.next_frame(picture)?;
    Ok(())
}

fn expect_bytes(is: Option<usize>, picture: &[u8]) -> Result<()> {
    match is == Some(picture.len()) {
        true => Ok(()),
        false => Err(format!("the image is not {SIZE} x {SIZE} with three channels").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an image whose pixel (row, column) has red `row`, green `column` and blue 0.
    fn gradients() -> Vec<u8> {
        let pixel = |idx: usize| [(idx / SIZE) as u8, (idx % SIZE) as u8, 0];
        (0..SIZE * SIZE).flat_map(pixel).collect()
    }

    fn png_of(picture: &[u8]) -> Vec<u8> {
        let mut file = vec![];
        let mut encoder = png::Encoder::new(&mut file, SIZE as u32, SIZE as u32);
        encoder.set_color(ColorType::Rgb);
        encoder.set_depth(BitDepth::Eight);
        encoder.write_header().unwrap().write_image_data(picture).unwrap();
        file
    }

    #[test]
    fn png_with_a_wrong_checksum_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("0.png");
        let mut picture = vec![0; SIZE * SIZE * 3];
        let mut read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            png(&path, &mut picture)
        };
        let correct = png_of(&gradients());
        read(&correct).unwrap();
        // The file ends with the checksum of the pixels, that of their chunk, and an empty chunk of
        // 12 bytes.
        let (chunk_end, pixels_end) = (correct.len() - 12, correct.len() - 16);
        let mut wrong = correct.clone();
        wrong[chunk_end - 1] ^= 1;
        let error = read(&wrong).unwrap_err().to_string();
        assert!(error.contains("CRC"), "{error}");
        wrong[pixels_end - 1] ^= 1;
        let start = wrong.windows(4).position(|name| name == b"IDAT").unwrap();
        let checksum = crc32fast::hash(&wrong[start..pixels_end]);
        wrong[pixels_end..chunk_end].copy_from_slice(&checksum.to_be_bytes());
        let error = read(&wrong).unwrap_err().to_string();
        assert!(error.contains("WrongChecksum"), "{error}");
    }

    #[test]
    fn grayscale_png_of_the_same_length_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("0.png");
        let mut file = vec![];
        let mut encoder = png::Encoder::new(&mut file, SIZE as u32 * 3, SIZE as u32);
        encoder.set_color(ColorType::Grayscale);
        encoder.set_depth(BitDepth::Eight);
        encoder.write_header().unwrap().write_image_data(&gradients()).unwrap();
        std::fs::write(&path, file).unwrap();
        let error = png(&path, &mut vec![0; SIZE * SIZE * 3]).unwrap_err().to_string();
        assert!(error.contains("three channels"), "{error}");
    }

    #[test]
    fn crops_are_windows_and_may_be_flipped() {
        let (picture, mut cropped) = (gradients(), vec![0; CROP_BYTES]);
        let mut check = |is_flipped, first: [u8; 3], last: [u8; 3]| {
            Crop { top: 3, left: 5, is_flipped }.cut(&picture, &mut cropped);
            assert_eq!(cropped[..3], first);
            assert_eq!(cropped[CROP_BYTES - 3..], last);
        };
        check(false, [3, 5, 0], [226, 228, 0]);
        check(true, [3, 228, 0], [226, 5, 0]);
    }

    #[test]
    fn both_ways_normalize_png_with_any_worker_count() {
        let folder = tempfile::tempdir().unwrap();
        for index in 0..5 {
            let path = folder.path().join(format!("{index}.png"));
            std::fs::write(path, png_of(&gradients())).unwrap();
        }
        let files = list(folder.path(), Format::Png).unwrap();
        let (mean, mean_square) = moments(&files, Format::Png, 2).unwrap();
        // The mean of red and green is 111.5 / 255; blue is 0.
        let expected = [0, 1, 2].map(|channel| {
            let level = if channel == 2 { 0.0 } else { 111.5 / 255.0 };
            (level - f64::from(MEAN[channel])) / f64::from(DEVIATION[channel])
        });
        assert!((mean - expected.iter().sum::<f64>() / 3.0).abs() < 1e-5, "{mean}");
        assert!(mean_square > mean * mean);

        for way in [LoaderKind::Stream, LoaderKind::Source] {
            let batches = |workers| -> Vec<_> {
                let data = data(files.clone(), Format::Png, way).unwrap().workers(workers);
                let loader = data.loader(crate::loading::plan(2), 0..3);
                let batch = |(pictures, labels): Pictures| {
                    (pictures.into_data(), labels.into_data().iter::<i64>().collect::<Vec<_>>())
                };
                loader.map(|loaded| batch(loaded.unwrap().unwrap())).collect()
            };
            let alone = batches(0);
            assert_eq!(alone, batches(2), "{way:?}");
            let mut labels: Vec<i64> =
                alone.iter().flat_map(|(_, labels)| labels.clone()).collect();
            labels.sort_unstable();
            assert_eq!(labels, [0, 1, 2, 3, 4], "{way:?}");
        }
    }
}
