// A picture opens as large as it was drawn: a narrow page shows all of it, but small.
const dialog = document.createElement("dialog")
dialog.className = "enlarged"
dialog.setAttribute("aria-label", "The picture, enlarged")
dialog.innerHTML = '<button type="button">Close</button><div tabindex="0"><img></div>'
document.body.append(dialog)
const image = dialog.querySelector("img")
dialog.addEventListener("click", () => dialog.close())

document.addEventListener("click", event => {
  const link = event.target.closest("a.picture")
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return
  event.preventDefault()
  const shown = link.querySelector("img")
  Object.assign(image, { src: link.href, alt: shown.alt })
  image.style.width = `${shown.naturalWidth / 2}px` // pictures have two dots for each that they are wide
  dialog.showModal()
  const view = dialog.querySelector("div")
  view.scrollLeft = (event.offsetX / shown.width) * view.scrollWidth - view.clientWidth / 2 // to what was tapped
})
